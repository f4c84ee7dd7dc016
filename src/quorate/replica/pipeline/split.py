"""The split of a replica: the places of cuts in the model, and the schedule of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quorate.errors import SettingError
from quorate.machine.devices import Group
from quorate.replica.computing import Computing
from quorate.replica.flat import Layout
from quorate.replica.phases.turn import CurrentPhase
from quorate.replica.whole_batch.gather import Gather

CHUNKS = 2  # default number of interleaved stages per device


@dataclass(frozen=True)
class Split:
    """The places where a model is cut, and the schedule."""

    names: tuple[str, ...] | None  # (S - 1,) modules before which the model is cut; None: open
    stages: int  # S
    schedule: str

    def as_chosen(self, computing: Computing) -> Split:
        """Return the split with the modules that were chosen for all workers of the run."""
        return self if computing.split is None else replace(self, names=computing.split)

    def require_fits(
        self,
        computing: Computing,
        turn: CurrentPhase,
        gradients: Layout,
        options: Mapping[str, Any],
    ) -> None:
        """Refuse settings that are not implemented for a replica in stages.

        Args:
            computing: settings of the replica's computation.
            turn: the loss functions of the replica.
            gradients: the layout of gradients.
            options: further options of the replica.

        Raises:
            SettingError: such a setting is used, or a property of the model is not supported.
        """
        obstacles = {
            "the loss has phases": turn.has_phases,
            "the loss is over the whole batch": isinstance(options["loss"], Gather),
            "gradients of tables are kept by rows": bool(gradients.tables),
            "the model is compiled": computing.compile,
            "operators are placed softly, or logged": computing.soft_placement
            or computing.log_placement,
            "precision is fp16": computing.precision.is_scaled,
            "forward writes parameters": bool(options.get("written"))
            or bool(options.get("mutable_frozen")),
        }
        for why, is_so in obstacles.items():
            if is_so:
                raise refused(self.names, why)


def refused(names: Sequence[str] | None, why: str, fix: str | None = None) -> SettingError:
    """Return the error for an impossible split.

    Args:
        names: the user's names; None: only the devices ask for stages.
        fix: the cure, unless it is to leave stages out.
    """
    if names is None:
        fix = fix or "name one device for each replica, as in devices='cpu'"
        return SettingError("devices", "several for a replica", f"one, as {why}", fix)
    return SettingError("split", ",".join(names), f"none, as {why}", fix or "leave it out")


def stages_of(groups: Sequence[Group], schedule: str) -> int:
    """Return the number of stages for a model that may be cut anywhere.

    Raises:
        SettingError: replicas have different numbers of devices.
    """
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        listed = ",".join(map(str, groups))
        fix = "name as many for each, or the modules with split"
        raise SettingError("devices", listed, "one number of devices for all replicas", fix)
    return sizes.pop() * (CHUNKS if schedule == "interleaved" else 1)


def require_devices(names: Sequence[str], groups: Sequence[Group]) -> None:
    """Refuse devices that do not fit the stages of named modules.

    Raises:
        SettingError: the devices do not fit.
    """
    for group in groups:
        stages = len(names) + 1
        if len(group) == 1 or stages % len(group):
            expected = f"{stages} devices for each replica, as in {'+'.join(['cpu'] * stages)}"
            fix = "name one module fewer than there are devices"
            raise SettingError("devices", str(group), expected, fix)
        if len({device.type for device in group}) > 1:
            fix = "take devices of one kind, or put the parts on them in the script without split"
            raise SettingError("split", ",".join(names), f"none on {group}", fix)
