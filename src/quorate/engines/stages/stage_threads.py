"""The threads of a replica, one for each of its devices, and their links: for GPUs.

A thread cannot be killed. One that ends by itself does so when its links are closed; one in a loop
of Python code, at its next line. One that waits in C++ for a device that never answers stays: it is
a daemon, and its worker is taken for one that hangs, as any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from quorate.engines.stages.arrivals import Arrivals, Ends
from quorate.engines.stages.devices import Devices
from quorate.engines.stages.handed import Hand, received
from quorate.engines.stages.process import PARENT, Shared
from quorate.machine.limits import STAGE_EXIT_S, THREAD_EXIT_S
from quorate.replica.compute_thread import CPU, become_compute_thread, interrupt


class EndedError(BaseException):
    """A thread is not wanted any more. No ``Exception``: user code must not go on after it."""


class Queues(Arrivals):
    """One thread's ends of its links to others of the process, by their numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._others: Mapping[int, Queues] = {}
        self._hands: dict[int, Hand] = {}

    def link(self, others: Mapping[int, Queues]) -> None:
        """Have these at the other ends."""
        self._others = others
        self._hands = {number: Hand(other._device) for number, other in others.items()}

    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a copy of a value, on the device of who is there."""
        self._others[to].put(key, self._hands[to].over(value))

    def take_soon(
        self, *keys: Hashable, within_s: float | None = None
    ) -> tuple[Hashable, Any] | None:
        """Do as ``take``; return None if nothing comes for so long. None: wait for ever."""
        taken = super().take_soon(*keys, within_s=within_s)
        return None if taken is None else (taken[0], received(taken[1]))

    def close(self) -> None:
        """Have whoever takes, here or at the other ends, hear that these are gone."""
        for number, other in self._others.items():
            other.lose(PARENT)
            self.lose(number)


class StageThreads(Devices):
    """One thread for each device.

    Args:
        devices: of the threads.
        shared: memory of this thread and the new ones.
        serve: run by each thread, called with the device's number, its links and ``shared``.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        shared: Shared,
        serve: Callable[[int, Ends, Shared], None],
    ) -> None:
        queues = {PARENT: Queues(CPU)}
        queues |= {number: Queues(device) for number, device in enumerate(devices)}
        for own, each in queues.items():
            each.link({number: other for number, other in queues.items() if number != own})
        super().__init__(shared, queues[PARENT])
        intra_op_threads = torch.get_num_threads()

        def run(number: int) -> None:
            become_compute_thread(intra_op_threads, devices[number])
            with suppress(EndedError):
                serve(number, queues[number], shared)
            queues[PARENT].lose(number)

        self._threads: list[threading.Thread] = []
        try:
            for number in range(len(devices)):
                name = f"quorate-stage-{number}"
                thread = threading.Thread(target=run, args=(number,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # there is no room for a thread
            self.close()
            raise

    def close(self) -> bool:
        """End the threads; unfinished work does not count.

        Returns:
            Whether all have ended: a thread that has not may still write to shared memory.
        """
        self.links.close()
        for thread in self._threads:
            thread.join(THREAD_EXIT_S)
            if thread.is_alive():
                interrupt(thread, EndedError)
        for thread in self._threads:
            thread.join(STAGE_EXIT_S)
        return not any(thread.is_alive() for thread in self._threads)
