"""Worker processes of one machine, which share memory with the coordinator.

On the coordinator's side:
transport       the engine: the shared memory, and the open jobs, each with its channel
supervisor      starts, monitors, restarts and ends workers
pool            where processes are started, and the coordinator's handle of each
endings         the messages printed when a worker ends
agreement       compares a worker with the coordinator
process_start   starts a process: a new interpreter, or a fork of the fork server

On the worker's side:
fork_server     imports torch, and forks into workers
worker          runs the script up to the training loop (script_as_worker), and computes from there
worker_loop     carries out the coordinator's messages, with the program that the script built

On both:
arena           the shared memory
wire            carries messages between a worker and the coordinator; an alarm ends a wait
worker_messages the messages
script          the running script, and how to run the script again
"""
