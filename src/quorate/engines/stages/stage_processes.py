"""The processes of a replica, one for each of its devices, and the parent's ends of their links."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

import psutil
import torch

from quorate.engines.processes.endings import Ending
from quorate.engines.stages import beside
from quorate.engines.stages.arrivals import Ends
from quorate.engines.stages.links import Links
from quorate.engines.stages.process import PARENT, Shared, become, close_all
from quorate.machine.container import oom_kills
from quorate.machine.descriptors import require_for_stages
from quorate.machine.dies_with_parent import JOB_SIGNALS
from quorate.machine.limits import STAGE_EXIT_S
from quorate.replica.beside.values import Values


class StageProcesses:
    """The processes of a replica, and the parent's ends of their links.

    Args:
        devices: how many.
        shared: what they have in common.
        serve: what each does, called with its number, its links and ``shared``.
        values: of ``Shared``, as the replica reads them: forks have these.
        name: what it is the process of.
    """

    def __init__(
        self,
        devices: int,
        shared: Shared,
        serve: Callable[[int, Links, Shared], None],
        values: Values | None = None,
        name: str = "stage",
    ) -> None:
        require_for_stages(devices)
        self._at_work = shared.at_work
        ends: dict[int, dict[int, socket.socket]] = {n: {} for n in (PARENT, *range(devices))}
        try:
            for one, other in combinations(ends, 2):
                ends[one][other], ends[other][one] = socket.socketpair()
        except OSError:
            close_all([end for own in ends.values() for end in own.values()])
            raise
        self._processes: list[Any] = []
        self._at_exit = Finalize(None, _kill, (self._processes,), exitpriority=10)
        # A fork: nothing that user code has made can travel in another way.
        context = multiprocessing.get_context("fork")
        parent, threads = os.getpid(), torch.get_num_threads()

        def run(number: int) -> None:
            become(parent, threads)
            close_all([e for n, own in ends.items() if n != number for e in own.values()])
            serve(number, Links(ends[number]), shared)

        # A signal that comes before a process ignores it waits until it does.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            for number in range(devices):
                process = context.Process(
                    target=run, args=(number,), name=f"quorate-{name}-{number}", daemon=True
                )
                process.start()
                self._processes.append(process)
            self.links: Ends = Links(ends[PARENT])
        except BaseException:
            self._end()
            for end in ends[PARENT].values():
                end.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            close_all([end for n, own in ends.items() if n != PARENT for end in own.values()])
        self._values = values
        self._at_work = shared.at_work
        self._oom_kills = oom_kills()  # before these

    def share(self, values: Values | None) -> None:
        """Have the next run read these values of ``Shared``."""
        if values is not None and values is not self._values:
            for number in range(len(self._processes)):
                self.links.send(number, "shared", beside.packed(values))
            self._values = values

    def late(self) -> int | None:
        """Return a stage that others wait for: of a stopped process, or one that computes."""
        found = [self._at_work.read(device) for device in range(len(self._processes))]
        for process, (stage, _) in zip(self._processes, found, strict=True):
            with suppress(psutil.Error):
                if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    return stage
        return min((stage for stage, computes in found if computes), default=None)

    def ended(self, device: int) -> tuple[int, str]:
        """Return at which stage a process was that is ending, and how it ended, in words."""
        # Others end by themselves when they miss it, and perhaps were seen to before it was.
        waiting = {process.sentinel: n for n, process in enumerate(self._processes)}
        while waiting and (ready := wait([*waiting], STAGE_EXIT_S)):
            for number in sorted(waiting.pop(sentinel) for sentinel in ready):
                process = self._processes[number]
                process.join()
                if process.exitcode:
                    ending = Ending(
                        process.exitcode,
                        is_out_of_memory=oom_kills() > self._oom_kills,
                        helps="more shards, more devices, another cut with split",
                    )
                    return self._at_work.read(number)[0], ending.text(had_joined=True)
        return self._at_work.read(device)[0], "closed its links"

    @property
    def are_alive(self) -> bool:
        """Whether none of them has ended."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> bool:
        """End them. What they were at does not count. Returns True: all have ended."""
        _kill(self._processes)
        self.links.close()
        self._end()
        return True

    def _end(self) -> None:
        """Kill the processes, and wait for their exit."""
        _kill(self._processes)
        for process in self._processes:
            process.join()
            process.close()
        self._processes.clear()
        self._at_exit.cancel()


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        with suppress(ValueError):  # it is closed
            process.kill()
