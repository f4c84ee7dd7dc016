"""Verification: whether a script gives the same bits on any number of workers, and why not.

recorder           around a transport: what parameters are after each update
recorded_training  the job: rows, outputs of modules and gradient of each shard
module_trace       what modules return, and the gradient that reaches it
twice              one shard computed twice in the same worker
operator_trace     each operator's inputs and outputs
calls              two such traces: which operator is to blame
records            what is noted of a run, in files
runs               which are made: numbers of workers, towers, a resume, a kill
differences        two runs: where they part
values             hashes
words              findings, for people
verdict            over all runs
"""
