"""Verification: whether a script gives the same bits on any number of workers, and why not.

recorder           around a transport: records the parameters after each update
recorded_training  the job: rows, outputs of modules and gradient of each shard
module_trace       outputs of modules, and the gradients that reach them
twice              one shard computed twice in the same worker
operator_trace     each operator's inputs and outputs
calls              the comparison of two operator traces: the responsible operator
records            the records of a run, in files
runs               the runs to make: numbers of workers, towers, a resume, a kill
differences        the first difference between two runs
values             hashes
words              findings, for people
verdict            the verdict over all runs
"""
