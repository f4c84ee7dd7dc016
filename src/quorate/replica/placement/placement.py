"""The devices of a replica's operators: the replica's own, or on request the CPU as a substitute.

A shard is computed plainly, at no cost, until an operator has no kernel. Then the shard is computed
again, with the same result, while all operators are watched: to name the operator and the module,
and from then on to use the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from quorate.errors import SettingError
from quorate.replica.computing import Computing
from quorate.replica.notes import Notes
from quorate.replica.on_host import CPU
from quorate.replica.placement.call_site import CallSites
from quorate.replica.placement.fallback import Key, MissingKernel, SoftPlacement, is_lacking
from quorate.replica.placement.log import PlacementLog
from quorate.replica.streams import Stream

T = TypeVar("T")


class Placement:
    """The placement of a replica's operators.

    Args:
        group: the replica's devices.
        computing: settings of the computation.
        notes: messages for the user.
        until: file of the code that computes shards.
    """

    def __init__(
        self, group: Sequence[torch.device], computing: Computing, notes: Notes, *, until: str
    ) -> None:
        self._kind = "+".join(device.type for device in group)
        self._is_cpu = all(device == CPU for device in group)
        self._is_soft = computing.soft_placement
        self._logs = computing.log_placement  # for the next shard
        self._notes = notes
        self._until = until
        self._known: dict[Key, MissingKernel] = {}

    def run(
        self,
        work: Callable[[bool], T],
        model: torch.nn.Module,
        stream: Stream,
        *,
        training: bool,
    ) -> T:
        """Return the result of ``work(watched)``, a repeatable computation of a shard.

        ``watched`` tells whether operators are watched: then they must run separately.

        Raises:
            RuntimeError: torch's error for an operator without a kernel; a note names the operator,
                the caller, and the reason for not using the CPU.
        """
        lacking: RuntimeError | None = None
        try:
            result = self._done(work, stream) if self._known else work(False)
        except RuntimeError as error:
            if not is_lacking(error):
                raise
            lacking = error
        if lacking is not None:
            result = self._placed(work, model, stream, lacking)
        if not (self._logs and training):
            return result
        self._logs = False
        with PlacementLog(model, self._until) as log:
            self._done(work, stream, watched=True)
        about = f"where the operators of a shard ran on a {self._kind} worker"
        self._notes.add(f"{about}:\n{log.table()}")
        # torch replaces a few operators while it is watched; the result of this run has the usual
        # bits.
        return self._done(work, stream)

    def _placed(
        self,
        work: Callable[[bool], T],
        model: torch.nn.Module,
        stream: Stream,
        first: RuntimeError,
    ) -> T:
        found, runs = dict(self._known), self._is_soft and not self._is_cpu
        while True:
            mode = SoftPlacement(found, stream, CallSites(model, self._until), runs=runs)
            try:
                with mode:
                    result = work(True)
            except RuntimeError as error:
                if mode.failed is None or not is_lacking(error):
                    raise  # an error of the script, or a later error
                if mode.is_unfinished:
                    continue
                if runs:
                    first = error  # earlier operators without a kernel ran on the CPU
                first.add_note(self._note(mode.failed, mode.stuck))
                break
            if mode.is_unfinished:  # and the script caught the error
                continue
            if runs:
                for lacking in [*found.values()][len(self._known) :]:
                    self._notes.add(f"{lacking.kernel} and runs on the CPU\n  {lacking.caller}")
                self._known = found
            return result
        raise first

    def _done(self, work: Callable[[bool], T], stream: Stream, *, watched: bool = False) -> T:
        if not self._known:
            return work(watched)
        with SoftPlacement(self._known, stream):
            return work(True)

    def _note(self, lacking: MissingKernel, stuck: str) -> str:
        if stuck:
            then = f"it cannot run on the CPU: {stuck}"
        elif lacking.device == CPU:
            then = "use another dtype or operator"
        else:
            then = "soft_placement=True (--soft-placement) runs it on the CPU"
        return f"quorate: {lacking.kernel}, {lacking.caller}; {then}"


def check(computing: Computing, devices: Sequence[torch.device]) -> None:
    """Refuse settings that cannot be combined.

    Raises:
        SettingError: compiled operators cannot be placed separately.
    """
    if computing.soft_placement and computing.compile and any(d != CPU for d in devices):
        raise SettingError(
            "soft_placement", True, "compile=False with it", "leave off one of the two"
        )


def remarks(
    computing: Computing, devices: Sequence[torch.device], master_device: torch.device
) -> list[str]:
    """Return the lines to show before the first shard.

    Args:
        devices: devices of the workers.
        master_device: device of the coordinator.
    """
    said = []
    if computing.soft_placement and all(device == CPU for device in devices):
        said.append("soft_placement has no effect: all workers are on the CPU")
    if computing.log_placement:
        said.append(
            f"shards are computed on {described(devices)}, sums and updates on {master_device}"
        )
    return said


def described(devices: Sequence[torch.device]) -> str:
    """Return the names of devices, each once."""
    return ", ".join(dict.fromkeys(map(str, devices)))
