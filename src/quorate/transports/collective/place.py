"""The place of a process among the ranks: from torchrun's environment, or from our own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quorate.coordination import rules
from quorate.errors import SettingError
from quorate.machine.devices import Group

OWN = "QUORATE_RANK"  # rank/size/path of a file, of ranks that were started by a rank 0


@dataclass(frozen=True)
class Place:
    """Which rank a process is, of how many, and where they meet.

    Args:
        local_rank: among the ranks of this host.
        meet: a URL for ``torch.distributed``.
        attempt: how often torchrun has started the ranks anew.
    """

    rank: int
    size: int
    local_rank: int
    meet: str
    attempt: str = "0"

    @property
    def text(self) -> str:
        """What the environment of a rank that is started here has under ``OWN``."""
        return f"{self.rank}/{self.size}/{self.meet.removeprefix('file:///')}"


def from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that this process was given; None if it was given none.

    Raises:
        SettingError: torchrun's environment is not whole.
    """
    if (text := environment.get(OWN)) is not None:
        own, of, path = text.split("/", 2)
        return Place(int(own), int(of), int(own), f"file:///{path}")
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        if name not in environment:
            raise SettingError(name, None, "what torchrun sets", "start the script by torchrun")
    rank, size, local_rank = (int(environment[name]) for name in names[:3])
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, size, local_rank, "env://", attempt)


def devices_of_ranks(place: Place, groups: Sequence[Group], count: int | None) -> tuple[Group, ...]:
    """Return the devices of each rank, as far as this one can know: all hosts are alike.

    Args:
        groups: what the settings give on this host.
        count: how many workers were asked for.

    Raises:
        SettingError: that is another number than there are ranks.
    """
    if count is not None and count != place.size:
        raise SettingError(
            "workers", count, f"{place.size}, as there are ranks", "leave it to torchrun"
        )
    local = groups[place.local_rank % len(groups)]
    return tuple(
        local if rank == place.rank else groups[rank % len(groups)] for rank in range(place.size)
    )


def require_suited(rule: rules.Rule, groups: Sequence[Group]) -> None:
    """Refuse what ranks cannot do.

    Raises:
        SettingError: updates are not made by all of them, or a replica has several devices.
    """
    if not isinstance(rule, rules.Sync):
        expected = "sync, as the ranks of a collective make each update together"
        raise SettingError("update", rule.name, expected, "or take engine='processes'")
    if (several := next((group for group in groups if len(group) > 1), None)) is not None:
        expected = "one device for each rank of a collective"
        raise SettingError("devices", str(several), expected, "or take engine='towers'")
