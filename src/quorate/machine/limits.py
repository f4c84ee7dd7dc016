"""Time limits: how long quorate waits for processes, threads, hosts and devices, in seconds.

All limits of engines, data and training are in this file, to be compared and changed together. A
user's own limits (``Workers(timeout_s=)``, ``Workers(start_timeout_s=)``) are settings. Costs that
decide between two ways to compute are no limits, and are defined beside the decision.
"""

from __future__ import annotations

# 1. Ends: from the request to end until the process or thread is killed or abandoned.
WORKER_EXIT_S = 0.5  # a worker process: results of an unfinished shard are useless
THREAD_EXIT_S = 1.0  # a thread, until a Python exception interrupts user code in the thread
BUSY_EXIT_S = 5.0  # a loader within a row, a service within a file, a rank within a shard
STAGE_EXIT_S = 30.0  # a stage whose links are closed: kernels on a GPU cannot be interrupted
KILLED_EXIT_S = 10.0  # a killed process: the kernel may wait for a disk of the network
SIGNALLED_EXIT_S = 10.0  # the run, after a second signal: tells workers, saves what was trained
ABANDONED_S = 0.1  # any thread, after a second Ctrl-C: user code is not waited for
FIRST_RANK_S = 5.0  # a rank of torchrun that leaves the printing of an error to the first rank
EXIT_REPORT_S = 1.0  # from the death of a process to the report of the death

# 2. Silence: after so long without a sign of life a party counts as lost.
WORKER_SILENCE_S = 5.0  # a worker that closed its socket, with torch to tear down
RANK_SILENCE_S = 10.0  # a rank; the longest that a link may be cut or a rank be stopped
CLUSTER_SILENCE_S = 20.0  # a Ray cluster; Ray itself goes on for 60 s
FULL_PIPE_S = 5.0  # the reader of standard output, whose pipe is full

# 3. Answers: from a request to the first answer.
LOCAL_CONNECT_S = 1.0  # a process of this machine, which accepts at once as long as it lives
CLUSTER_CONNECT_S = 5.0  # the address of a Ray cluster
STORE_CONNECT_S = 60.0  # torch.distributed's store on another host
CLUSTER_ANSWER_S = 5  # the status of a Ray cluster; Ray takes whole seconds
ACTOR_ANSWER_S = 60.0  # the actor of a detached run, which may be restarting
COMPILE_S = 600.0  # torch.compile, for each new shape

# 4. Gathering: how long those that are ready wait for the rest.
FIRST_WORKERS_S = 10.0  # workers, before the first update: most differences show up in this time
SPOT_CHECK_JOIN_S = 0.1  # workers that begin a spot check later take no part
SPOT_CHECK_ANSWER_S = 0.5  # at least, for an answer after the first one
SPOT_CHECK_S = 5.0  # at least, for all answers together
NODE_SUM_S = 1.0  # at most, for further results of a step on the same node
LAST_OUTPUT_S = 20.0  # a detached run after its end, for viewers to read the last lines

# 5. Intervals between two looks at a state that nobody reports.
FILE_POLL_S = 0.02  # a file or an exit code that another rank is about to write
SUPERVISOR_POLL_S = 0.1  # workers that start, are silent, or wait for others
RANK_POLL_S = 0.2  # lost ranks, while a pipe is silent; an actor reports as often
STAGE_POLL_S = 0.5  # which stage is late; whether a listener is to end
WORKER_POLL_S = 1.0  # the state of a Ray cluster, a request of 3 ms
