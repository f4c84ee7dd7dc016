"""The processes of a replica, one for each of its devices, and the parent's ends of their links."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from multiprocessing.util import Finalize
from typing import Any

import torch

from quorate.machine.dies_with_parent import JOB_SIGNALS
from quorate.transports.stages.links import Links
from quorate.transports.stages.process import PARENT, Shared, become, close_all


class StageProcesses:
    """The processes of a replica, and the parent's ends of their links.

    Args:
        devices: how many.
        shared: what they have in common.
        serve: what each does, called with its number, its links and ``shared``.
        name: what it is the process of.
    """

    def __init__(
        self,
        devices: int,
        shared: Shared,
        serve: Callable[[int, Links, Shared], None],
        name: str = "stage",
    ) -> None:
        ends: dict[int, dict[int, socket.socket]] = {n: {} for n in (PARENT, *range(devices))}
        for one, other in combinations(ends, 2):
            ends[one][other], ends[other][one] = socket.socketpair()
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
        except BaseException:
            _kill(self._processes)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            close_all([end for n, own in ends.items() if n != PARENT for end in own.values()])
        self.links = Links(ends[PARENT])

    @property
    def are_alive(self) -> bool:
        """Whether none of them has ended."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End them. What they were at does not count."""
        _kill(self._processes)
        self.links.close()
        for process in self._processes:
            process.join()
            process.close()
        self._processes.clear()
        self._at_exit.cancel()


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        with suppress(ValueError):  # it is closed
            process.kill()
