"""Worker processes of one machine, which share memory with the coordinator.

On the coordinator's side:
transport       the engine: the jobs that are open, and the memory that workers share
channel         one job's conversation with all workers: who computes which shard into which slot
supervisor      starts, monitors, restarts and ends workers
pool            where processes are started, and the coordinator's handle of each
endings         the messages printed when a worker ends
agreement       compares a worker with the coordinator
alarm           ends a wait for all workers
process_start   starts a process: a new interpreter, or a fork of the fork server

On the worker's side:
fork_server     has imported torch, and forks into workers
worker          runs the script up to its training loop (script_as_worker), and serves there
program         what the script made, to compute with
shard_loop      computes shards

On both:
arena           what is in shared memory
wire            messages between the two
script          the script that is running, and how to run it once more
"""
