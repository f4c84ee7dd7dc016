"""Worker processes of one machine, which share memory with the coordinator.

On the coordinator's side:
transport       processes, wires, the clock: carries out decisions and reports what came of them
channel         one job's conversation with all workers: who computes which shard into which slot
supervisor      what becomes of all workers, decided without any process
member          what becomes of one: its states
decisions       what there is to be decided
restarts        whether and when a worker that ended is started again
endings         how a process ended, in words
agreement       whether a worker is the same as the coordinator
alarm           ends a wait for all of them
pool            where processes are started, and what the coordinator has of each
worker_process  one process of a worker of this machine, and what belongs to it
process_start   how it is started: a new interpreter, or a fork of the fork server

On the worker's side:
fork_server     has imported torch, and forks into workers
worker          runs the script up to its training loop (script_as_worker), and serves there
program         what the script made, to compute with
shard_loop      computes shards

On both:
arena           what is in shared memory
wire            messages between the two
script          the script that is running, and how to run it once more
remote_error    exceptions that travel
"""
