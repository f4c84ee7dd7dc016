"""The devices of a pipelined replica: processes on CPUs, threads on GPUs.

A process is killed. A thread cannot be killed: after the links are closed the thread ends, or at
the next line of Python in a loop. A thread in C++ that waits for an unresponsive device stays,
as a daemon; such a worker counts as hung.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from multiprocessing.connection import wait
from typing import Any

import torch

from quorate.engines.processes.endings import Ending
from quorate.engines.stages.links import PARENT, QueueLinks, SocketLinks, StageLinks
from quorate.engines.stages.stage_runner import StageActivity, StageDevice
from quorate.machine import this_host
from quorate.machine.descriptors import require_for_stages
from quorate.machine.forked_child import ForkedChild, end_children
from quorate.machine.limits import STAGE_EXIT_S, THREAD_EXIT_S
from quorate.machine.out_of_memory import be_killed_first
from quorate.machine.resources import oom_kills
from quorate.replica.compute_thread import CPU, become_compute_thread, end_threads

Serve = Callable[[StageDevice], None]  # the main function of a device


class StageDevices(ABC):
    """The devices of a replica at work.

    Args:
        devices: number of devices.

    Attributes:
        links: the parent's links to the devices.
    """

    links: StageLinks

    def __init__(self, devices: int) -> None:
        self._count = devices
        self._activity = StageActivity(devices)

    def late(self) -> int | None:
        """Return the first computing stage: later stages wait for its result."""
        found = [self._activity.read(device) for device in range(self._count)]
        return min((stage for stage, computes in found if computes), default=None)

    def ended(self, device: int) -> tuple[int, str]:
        """Return the last stage of an ending device, and in words how the device ended."""
        return self._activity.read(device)[0], "closed its links"

    @abstractmethod
    def close(self) -> bool:
        """End the devices; unfinished work does not count.

        Returns:
            Whether all have ended: a device that has not may still write to shared memory.
        """


class StageProcesses(StageDevices):
    """Forks of this process: objects made by user code cannot travel between processes.

    Args:
        devices: number of processes.
        serve: run by each process.
        name: of the processes, before the number.
    """

    def __init__(self, devices: int, serve: Serve, name: str = "stage") -> None:
        require_for_stages(devices)
        super().__init__(devices)
        self._oom_kills = oom_kills()  # before these
        self._children: list[ForkedChild] = []
        threads = torch.get_num_threads()
        ends: dict[int, dict[int, socket.socket]] = {n: {} for n in (PARENT, *range(devices))}

        def run(number: int) -> None:
            be_killed_first()
            become_compute_thread(threads, CPU)
            serve(StageDevice(number, devices, SocketLinks(ends[number]), self._activity))

        try:
            for one, other in combinations(ends, 2):
                ends[one][other], ends[other][one] = socket.socketpair()
            for number in range(devices):
                others = [end for n, own in ends.items() if n != number for end in own.values()]
                child = ForkedChild(f"{name}-{number}", run, number, closes=others, threads=threads)
                self._children.append(child)
            self.links = SocketLinks(ends[PARENT])
            del ends[PARENT]
        except BaseException:
            end_children(self._children)
            raise
        finally:
            for end in (end for own in ends.values() for end in own.values()):
                end.close()

    def late(self) -> int | None:
        """Return the stage of a stopped process, or the first computing stage."""
        stopped = (n for n, each in enumerate(self._children) if this_host.is_stopped(each.pid))
        device = next(stopped, None)
        return super().late() if device is None else self._activity.read(device)[0]

    def ended(self, device: int) -> tuple[int, str]:
        """Return the stage of a failed process, and in words how the process ended."""
        # The remaining processes end by themselves, and may have been noticed first.
        waiting: dict[Any, int] = {child.sentinel: n for n, child in enumerate(self._children)}
        while waiting and (ready := wait([*waiting], STAGE_EXIT_S)):
            for number in sorted(waiting.pop(sentinel) for sentinel in ready):
                if code := self._children[number].wait(STAGE_EXIT_S):
                    ending = Ending(code, helps="more shards, more devices, another cut with split")
                    how = ending.explained(self._oom_kills).text(had_joined=True)
                    return self._activity.read(number)[0], how
        return super().ended(device)

    @property
    def are_alive(self) -> bool:
        """True if no process has ended."""
        return all(child.wait(0.0) is None for child in self._children)

    def close(self) -> bool:
        """Kill the processes. Returns True: all have ended."""
        for child in self._children:
            child.kill()
        self.links.close()
        end_children(self._children)
        return True


class EndedError(BaseException):
    """A thread has to end. No ``Exception``: user code must not go on after the error."""


class StageThreads(StageDevices):
    """A thread for each device.

    Args:
        devices: of the threads.
        serve: run by each thread.
    """

    def __init__(self, devices: Sequence[torch.device], serve: Serve) -> None:
        super().__init__(len(devices))
        links = QueueLinks.between({PARENT: CPU, **dict(enumerate(devices))})
        self.links = links[PARENT]
        intra_op_threads = torch.get_num_threads()

        def run(number: int) -> None:
            become_compute_thread(intra_op_threads, devices[number])
            with suppress(EndedError):
                serve(StageDevice(number, len(devices), links[number], self._activity))
            self.links.lose(number)

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
        return not end_threads(self._threads, EndedError, THREAD_EXIT_S, STAGE_EXIT_S)
