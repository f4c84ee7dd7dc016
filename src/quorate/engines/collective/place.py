"""The place of a process among the ranks: from torchrun's environment, or from a rank 0 of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quorate.errors import SettingError
from quorate.machine.environment import torchrun_environment


@dataclass(frozen=True)
class Place:
    """Which rank a process is, of how many, and where they meet.

    Args:
        local_rank: among the ranks of this host.
        meet: a URL for ``torch.distributed``.
        board: the file of the ranks' board, where all are of one machine; None: the store is one.
        attempt: how often torchrun has started the ranks anew.
        endpoint: host and port of the store that they meet by; None: a file.
    """

    rank: int
    size: int
    local_rank: int
    meet: str
    attempt: str = "0"
    board: str | None = None
    endpoint: tuple[str, int] | None = None

    @property
    def where(self) -> str:
        """The store that they meet by, in words."""
        return "" if self.endpoint is None else f"{self.endpoint[0]}:{self.endpoint[1]}"


_given: Place | None = None  # by the rank 0 that started this process


def take(place: Place) -> None:
    """Have this process be a rank that another one has started."""
    global _given
    _given = place


def own_place() -> Place | None:
    """Return the place that this process was given; None if it was given none.

    Raises:
        SettingError: torchrun's environment is not whole.
    """
    return _given or from_torchrun(torchrun_environment())


def from_torchrun(environment: Mapping[str, str]) -> Place | None:
    """Return the place that an environment of torchrun's says; None if it is none."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        if name not in environment:
            raise SettingError(name, None, "what torchrun sets", "start the script by torchrun")
    rank, size, local_rank = (int(environment[name]) for name in names[:3])
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    endpoint = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return Place(rank, size, local_rank, "env://", attempt, endpoint=endpoint)
