"""The place of a process among the ranks: from torchrun's environment, or from a rank 0 of ours.

torchrun's store also notes work to be done once. The arguments of the script are the same
in each start of the ranks: ``fresh`` would set aside the training of earlier ranks. torchrun
counts restarts, but neither those for a host that joins or leaves, nor how far a script came. So a
note in the store records the finished work, as the store outlives the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from quorate.errors import RankError, SettingError
from quorate.machine.environment import torchrun_environment
from quorate.machine.limits import STORE_CONNECT_S


@dataclass(frozen=True)
class RankPlace:
    """Rank of a process, number of ranks, and the meeting point.

    Args:
        local_rank: among the ranks of this host.
        meet: a URL for ``torch.distributed``.
        board: file for heartbeats of ranks of a single machine; None: the store has heartbeats.
        attempt: number of restarts by torchrun.
        endpoint: host and port of the store for the meeting; None: a file.
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
        """Host and port of the store, in words."""
        return "" if self.endpoint is None else f"{self.endpoint[0]}:{self.endpoint[1]}"

    def rendezvous(self, limit_s: float) -> Any:
        """Return a store of torch.distributed that all ranks reach. Blocks."""
        timeout = timedelta(seconds=limit_s)
        store, _, _ = next(_dist().rendezvous(self.meet, self.rank, self.size, timeout=timeout))
        return store

    def torchrun_store(self) -> Any | None:
        """Return torchrun's store; None if the ranks' own store ends with the ranks. Blocks.

        Raises:
            RankError: the store is not reached.
        """
        has_store = torchrun_environment().get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.endpoint is None or not has_store:
            return None
        try:
            timeout = timedelta(seconds=STORE_CONNECT_S)
            return _dist().TCPStore(*self.endpoint, is_master=False, timeout=timeout)
        except RuntimeError as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise RankError("the store of torchrun was not reached", f"{line:.300}") from error


_given: RankPlace | None = None  # by the rank 0 that started this process


def take(place: RankPlace) -> None:
    """Make this process a rank, started by rank 0."""
    global _given
    _given = place


def own_place() -> RankPlace | None:
    """Return the place of this process; None outside of ranks.

    Raises:
        SettingError: a variable of torchrun's environment is missing.
    """
    return _given or from_torchrun(torchrun_environment())


def from_torchrun(environment: Mapping[str, str]) -> RankPlace | None:
    """Return the place in an environment of torchrun's; None for all environments without one."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        if name not in environment:
            raise SettingError(name, None, "what torchrun sets", "start the script by torchrun")
    rank, size, local_rank = (int(environment[name]) for name in names[:3])
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    endpoint = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return RankPlace(rank, size, local_rank, "env://", attempt, endpoint=endpoint)


def was_done_before(what: str) -> bool:
    """Return whether an earlier start of these ranks did some work already. Blocks.

    Raises:
        RankError: the store is not reached.
    """
    place = own_place()
    if place is None or place.endpoint is None or place.rank > 0:  # no torchrun; or not to be done
        return False
    store = place.torchrun_store()
    return place.attempt != "0" if store is None else bool(store.check([_key(what)]))


def note_done(what: str) -> None:
    """Note that some work is done. Blocks.

    Raises:
        RankError: the store is not reached.
    """
    place = own_place()
    if place is not None and (store := place.torchrun_store()) is not None:
        store.set(_key(what), "done")


def _dist() -> Any:
    import torch.distributed  # not in each build of torch

    return torch.distributed


def _key(what: str) -> str:
    return f"quorate/once/{what}"
