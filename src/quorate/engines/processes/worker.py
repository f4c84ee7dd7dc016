"""A worker process: runs the script up to the training loop, and computes shards from there on.

A worker owns nothing that matters: parameters, results and position are the coordinator's.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

from quorate.engines.collective.rank_place import take
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.script_as_worker import run_script, warnings_of_script
from quorate.engines.processes.wire import Wire
from quorate.engines.processes.worker_loop import WorkerLoop, WorkerProgram
from quorate.errors import UserError
from quorate.machine.freed_memory import keep_freed_memory
from quorate.machine.out_of_memory import be_killed_first
from quorate.machine.signal_handlers import OF_PYTHON, ignore_job_signals
from quorate.machine.standard_streams import (
    Steady,
    flush_standard_streams,
    occupy_standard_descriptors,
    steady,
)
from quorate.replica.compute_thread import become_compute_thread
from quorate.replica.deterministic import repeatable
from quorate.replica.streams import Stream

# A fact of the process, known before the script runs: the trainer that the script makes asks.
_here: Worker | None = None


def here() -> Worker | None:
    """Return the worker of this process; None in a coordinator."""
    return _here


def run(*, wire: int, output: int) -> None:
    """Run the script, which does not return from the first training loop.

    Args:
        wire: descriptor of the worker's end of the wire. The first message is ``StartWorker``.
        output: descriptor in the place of standard output and error up to the training loop. The
            coordinator prints the same text, and shows the worker's only if something goes wrong.
    """
    global _here
    occupy_standard_descriptors()
    end = Wire(socket.socket(fileno=wire))
    start = end.receive()
    if not isinstance(start, messages.StartWorker):
        return  # the coordinator has ended
    ignore_job_signals(before=OF_PYTHON)  # the script's own children do not
    _here = Worker(start.number, end, output)
    if start.place is not None:
        take(start.place)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a rank is asked to end as any other is
    with steady():  # also while it is hidden: a full disk for temporary files is no news
        run_script(start.script, start.own, end.send)
    sys.exit("the script came to its end without a training loop")


class Worker:
    """A process that was started as a worker: runs the script, then computes shards.

    Args:
        number: of the worker.
        wire: the worker's end of the wire.
        output: descriptor in the place of standard output and error until ``serve``.
    """

    def __init__(self, number: int, wire: Wire, output: int) -> None:
        self.number = number
        self._wire = wire
        be_killed_first()
        self._outputs = {fd: os.dup(fd) for fd in (1, 2)}
        for fd in self._outputs:
            os.dup2(output, fd)
        os.close(output)

    def serve(self, program: WorkerProgram) -> NoReturn:
        """Compute shards for the coordinator, and end this process with the last message.

        Nothing of the script runs after this, no ``finally`` and no ``atexit``: both run once, in
        the coordinator.
        """
        code = 1
        with suppress(ValueError):  # the script trains in another thread than the main one
            ignore_job_signals()  # whatever the script made of them

        def serve() -> None:
            nonlocal code
            try:
                with repeatable(program.computing, program.group):
                    self._serve(program)
                code = 0
            except UserError as error:
                self.refuse(error)
            except BaseException:  # the edge of the process
                traceback.print_exc()

        keep_freed_memory()
        # In a thread of its own, as a tower: what the script has around its loop (autocast, a
        # default device) is the thread's that it runs in, and reaches no shard.
        thread = threading.Thread(target=serve, name=f"quorate-worker-{self.number}")
        thread.start()
        thread.join()
        flush_standard_streams()
        os._exit(code)

    def refuse(self, error: UserError) -> None:
        """Tell the coordinator, or rank 0, which mistake of the user ends this process."""
        self._wire.send(messages.ScriptRefused(str(error)))

    def _serve(self, program: WorkerProgram) -> None:
        # 1. The thread.
        device = program.group[0]
        become_compute_thread(program.threads, device)
        # 2. What is shared. ``ReachedLoop`` must come after all that the script did before its loop
        # (no bound but worker_timeout_s); the answer holds descriptors of shared memory.
        if device.type == "cpu":
            program.model.to(device)
        for line in warnings_of_script():
            program.notes.add(line)
        self._send_notes(program)
        self._wire.send(messages.ReachedLoop())
        answer = self._wire.receive()
        if not isinstance(answer, messages.ShareMemory):
            return  # the coordinator has ended, or ends this process
        arena = Arena.attach(answer.description, self._wire.fds, program.model)
        replica = program.new_replica(arena, answer.computing)
        # 3. From here on what user code prints is news: the coordinator's script prints it not.
        self.show()
        # 4. Shards, until the coordinator ends this process or is gone itself.
        loop = WorkerLoop(self.number, self._wire, arena, replica, program)
        with Stream() as stream:
            arena.sheets[self.number].tell("waiting")
            while (request := self._wire.receive()) is not None and loop.handle(request, stream):
                self._send_notes(program)
        replica.close()

    def _send_notes(self, program: WorkerProgram) -> None:
        for note in program.notes.take():
            self._wire.send(messages.FoundNote(note))

    @property
    def hides_output(self) -> bool:
        """True until ``show``: whoever started this process prints the output after a failure."""
        return bool(self._outputs)

    def show(self) -> None:
        """Show the output of user code from now on, where the coordinator's output goes."""
        flush_standard_streams()
        while self._outputs:
            fd, original = self._outputs.popitem()
            os.dup2(original, fd)
            os.close(original)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Steady):
                stream.fault = None  # it leads elsewhere now
