"""The processes of a replica, one for each of its devices, and the parent's ends of their links."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import combinations
from multiprocessing.connection import wait
from typing import Any

import torch

from quorate.engines.processes.endings import Ending
from quorate.engines.stages.devices import Devices
from quorate.engines.stages.links import Links
from quorate.engines.stages.process import PARENT, Shared
from quorate.machine import this_host
from quorate.machine.container import oom_kills
from quorate.machine.descriptors import require_for_stages
from quorate.machine.forked_child import ForkedChild, end_children
from quorate.machine.limits import STAGE_EXIT_S
from quorate.machine.out_of_memory import be_killed_first
from quorate.replica.beside.values import Values
from quorate.replica.compute_thread import CPU, become_compute_thread


class StageProcesses(Devices):
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
        serve: Callable[[int, Links, Shared], None],
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
            serve(number, Links(ends[number]), shared)

        try:
            for one, other in combinations(ends, 2):
                ends[one][other], ends[other][one] = socket.socketpair()
            for number in range(devices):
                others = [end for n, own in ends.items() if n != number for end in own.values()]
                child = ForkedChild(f"{name}-{number}", run, number, closes=others, threads=threads)
                self._children.append(child)
            super().__init__(shared, Links(ends[PARENT]), values)
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
