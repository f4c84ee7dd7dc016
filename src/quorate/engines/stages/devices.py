"""The devices of a pipelined replica: processes on CPUs, threads on GPUs.

A process is killed. A thread cannot be killed: after the links are closed the thread ends, or at
the next line of Python in a loop. A thread that waits in C++ for a device without an answer stays,
as a daemon; such a worker counts as hung, like any other.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch

from quorate.engines.processes.endings import Ending
from quorate.engines.stages.links import Arrivals, SocketLinks, StageLinks
from quorate.engines.stages.stage_runner import PARENT, Shared, packed_values
from quorate.machine import this_host
from quorate.machine.descriptors import require_for_stages
from quorate.machine.devices import has_streams
from quorate.machine.forked_child import ForkedChild, end_children
from quorate.machine.limits import STAGE_EXIT_S, THREAD_EXIT_S
from quorate.machine.out_of_memory import be_killed_first
from quorate.machine.resources import oom_kills
from quorate.replica.beside.values import Values
from quorate.replica.compute_thread import CPU, become_compute_thread, interrupt
from quorate.replica.nested import leaves, mapped_leaves, tensors
from quorate.replica.transfer import copied


class StageDevices(ABC):
    """The devices of a replica at work, and the parent's ends of the links to the devices.

    Args:
        shared: memory of the parent and all devices.
        links: the parent's ends.
        values: of ``Shared``, as the devices have them from the start.
    """

    def __init__(self, shared: Shared, links: StageLinks, values: Values | None = None) -> None:
        self.links = links
        self._count, self._at_work = shared.devices, shared.at_work
        self._values = values

    def share(self, values: Values | None) -> None:
        """Have the next run read these values of ``Shared``."""
        if values is not None and values is not self._values:
            for number in range(self._count):
                self.links.send(number, "shared", packed_values(values))
            self._values = values

    def late(self) -> int | None:
        """Return the first stage that computes, for which later stages wait."""
        found = [self._at_work.read(device) for device in range(self._count)]
        return min((stage for stage, computes in found if computes), default=None)

    def ended(self, device: int) -> tuple[int, str]:
        """Return the last stage of a device that is ending, and in words how the device ended."""
        return self._at_work.read(device)[0], "closed its links"

    @abstractmethod
    def close(self) -> bool:
        """End the devices; unfinished work does not count.

        Returns:
            Whether all have ended: a device that has not may still write to shared memory.
        """


class StageProcesses(StageDevices):
    """Forks of this process, since objects made by user code travel in no other way.

    Args:
        devices: number of processes.
        shared: memory of this process and the forks.
        serve: run by each process, called with the device's number, its links and ``shared``.
        values: of ``Shared``, as the replica reads them: forks have these.
        name: of the processes, before the number.
    """

    def __init__(
        self,
        devices: int,
        shared: Shared,
        serve: Callable[[int, SocketLinks, Shared], None],
        values: Values | None = None,
        name: str = "stage",
    ) -> None:
        require_for_stages(devices)
        self._oom_kills = oom_kills()  # before these
        self._children: list[ForkedChild] = []
        threads = torch.get_num_threads()
        ends: dict[int, dict[int, socket.socket]] = {n: {} for n in (PARENT, *range(devices))}

        def run(number: int) -> None:
            be_killed_first()
            become_compute_thread(threads, CPU)
            serve(number, SocketLinks(ends[number]), shared)

        try:
            for one, other in combinations(ends, 2):
                ends[one][other], ends[other][one] = socket.socketpair()
            for number in range(devices):
                others = [end for n, own in ends.items() if n != number for end in own.values()]
                child = ForkedChild(f"{name}-{number}", run, number, closes=others, threads=threads)
                self._children.append(child)
            super().__init__(shared, SocketLinks(ends[PARENT]), values)
        except BaseException:
            end_children(self._children)
            for end in ends[PARENT].values():
                end.close()
            raise
        finally:
            for own in (ends[number] for number in range(devices)):
                for end in own.values():
                    end.close()

    def late(self) -> int | None:
        """Return the stage of a stopped process, or the first stage that computes."""
        stopped = (n for n, each in enumerate(self._children) if this_host.is_stopped(each.pid))
        device = next(stopped, None)
        return super().late() if device is None else self._at_work.read(device)[0]

    def ended(self, device: int) -> tuple[int, str]:
        """Return the stage of a process that failed, and in words how the process ended."""
        # Others end by themselves when they miss it, and perhaps were seen to before it was.
        waiting: dict[Any, int] = {child.sentinel: n for n, child in enumerate(self._children)}
        while waiting and (ready := wait([*waiting], STAGE_EXIT_S)):
            for number in sorted(waiting.pop(sentinel) for sentinel in ready):
                if code := self._children[number].wait(STAGE_EXIT_S):
                    ending = Ending(
                        code,
                        is_out_of_memory=oom_kills() > self._oom_kills,
                        helps="more shards, more devices, another cut with split",
                    )
                    return self._at_work.read(number)[0], ending.text(had_joined=True)
        return super().ended(device)

    @property
    def are_alive(self) -> bool:
        """Whether none of the processes has ended."""
        return all(child.wait(0.0) is None for child in self._children)

    def close(self) -> bool:
        """Kill the processes. Returns True: all have ended."""
        for child in self._children:
            child.kill()
        self.links.close()
        end_children(self._children)
        return True


class EndedError(BaseException):
    """A thread is not wanted any more. No ``Exception``: user code must not go on after it."""


class QueueLinks(Arrivals):
    """One thread's ends of its links to others of the process, by their numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._others: Mapping[int, QueueLinks] = {}
        self._copiers: dict[int, DeviceCopier] = {}

    def link(self, others: Mapping[int, QueueLinks]) -> None:
        """Have these at the other ends."""
        self._others = others
        self._copiers = {number: DeviceCopier(other._device) for number, other in others.items()}

    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a copy of a value, on the device of who is there."""
        self._others[to].put(key, self._copiers[to].over(value))

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


class StageThreads(StageDevices):
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
        serve: Callable[[int, StageLinks, Shared], None],
    ) -> None:
        queues = {PARENT: QueueLinks(CPU)}
        queues |= {number: QueueLinks(device) for number, device in enumerate(devices)}
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


# --- values between threads, each of which computes on a device of its own -----------------------

# On the host values are copied: a stage may write in place to a value that an earlier stage has
# saved for the backward pass. Between GPUs values are copied on two extra streams, one at each end,
# so that no stage waits in the queue of another; an event marks the arrival, and both streams note
# their use of the memory, which the allocator would hand out again else.
#
# Strides stay the same: kernels, and so bits, may go by strides.


class ValueInTransit(NamedTuple):
    """A value on its way to a GPU."""

    value: Any
    arrived: Any  # the event


class DeviceCopier:
    """Copies values for a thread on a device.

    Args:
        device: of the receiving thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sides: dict[torch.device, torch.Stream] = {}  # of the ends

    def over(self, value: Any) -> Any:
        """Return a copy on the way; ``received`` returns the copy in the receiving thread."""
        source = next((t.device for t in tensors(value) if has_streams(t.device)), None)
        if source is None or not has_streams(self._device):
            return mapped_leaves(value, self._copied)
        return self._between_gpus(value, source)

    def _copied(self, leaf: Any) -> Any:
        # A tensor of the host goes to a GPU when it is wanted there, and not before.
        if not isinstance(leaf, torch.Tensor) or leaf.device in (CPU, self._device):
            return copied(leaf)
        return _with_strides(leaf, lambda tensor: tensor.to(self._device))

    def _between_gpus(self, value: Any, source: torch.device) -> ValueInTransit:
        begin, end = self._side(source), self._side(self._device)
        begin.wait_event(torch.accelerator.current_stream(source).record_event())

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device != source:
                return copied(leaf)
            leaf.record_stream(begin)
            return _with_strides(leaf, lambda t: t.to(self._device, non_blocking=True, copy=True))

        with end, begin:
            there = mapped_leaves(value, moved)
            if end is not begin:  # what torch has it wait for, if devices have no way of their own
                end.wait_event(begin.record_event())
            return ValueInTransit(there, end.record_event())

    def _side(self, device: torch.device) -> torch.Stream:
        if device not in self._sides:
            self._sides[device] = torch.Stream(device)
        return self._sides[device]


def received(value: Any) -> Any:
    """Return a copy that has arrived, for the calling thread's current streams."""
    if not isinstance(value, ValueInTransit):
        return value
    for leaf in leaves(value.value):
        if isinstance(leaf, torch.Tensor) and has_streams(leaf.device):
            current = torch.accelerator.current_stream(leaf.device)
            current.wait_event(value.arrived)
            leaf.record_stream(current)
    return value.value


def _with_strides(
    tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a moved tensor with the same strides, also with gaps or repeated elements."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_nested:
        return move(tensor)
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if extent > 2 * tensor.numel():
        return move(tensor)
    window = move(tensor.as_strided((extent,), (1,)))
    return window.as_strided(tensor.shape, tensor.stride())
