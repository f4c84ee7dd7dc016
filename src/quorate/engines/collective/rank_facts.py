"""Facts about ranks, compared before anything else: whether the ranks fit together.

Facts go through the store of the meeting. Different ranks would hang or fail in their first
exchange: builds of torch with different packing of tensors, a GPU and a CPU.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quorate.engines.collective.network import own_address
from quorate.engines.collective.rank_place import RankPlace
from quorate.engines.messages import pack, unpack
from quorate.engines.processes.script import current
from quorate.errors import SettingError, UserError
from quorate.machine import this_host
from quorate.machine.gpu_identity import uuid_of
from quorate.machine.text import printable


class RankFacts(NamedTuple):
    """Facts about a rank."""

    address: str  # of the host, on the way to the store
    host: str  # see ``this_host.mark``
    device: str  # the kind of device that the rank computes on
    gpu: str | None  # the same name for all ranks of a host; None for a CPU, and if unknown
    torch: str  # the build
    script: str  # a hash of the text
    workers: int | None  # the number in the settings; None if the settings name no number


_ALIKE = {
    "device": (
        "the kind of device",
        "a rank that sees no GPU computes on the CPU, and other bits; `quorate doctor` on its host "
        "says why, --devices cpu takes none on any",
    ),
    "torch": ("the torch build", "install the same one on every host"),
    "script": ("the script's text", "start the same file on every host"),
}


def gather_facts(
    store: Any, place: RankPlace, device: torch.device, workers: int | None
) -> list[RankFacts]:
    """Return the facts about all ranks, by rank. All ranks call. Blocks.

    Args:
        store: shared by these ranks, without entries of earlier ranks.
        device: on which this rank computes.
        workers: the number of ranks in the settings of this rank; None if they name no number.
    """
    own = RankFacts(
        *(own_address(place.endpoint), this_host.mark(), device.type, _gpu(device, place)),
        *(torch.__version__, _script_hash(), workers),
    )
    store.set(f"facts-{place.rank}", pack(own))
    texts = store.multi_get([f"facts-{rank}" for rank in range(place.size)])
    return [RankFacts(*unpack(text)) for text in texts]


def _gpu(device: torch.device, place: RankPlace) -> str | None:
    """Return a name of this rank's GPU that means the same GPU to all ranks of the host."""
    if device.type == "cpu":
        return None
    if (uuid := uuid_of(device)) is not None:
        return f"GPU-{uuid}"
    # Ranks of torchrun may each see one GPU, called 0 by all of them.
    return None if place.endpoint is not None else str(device)


def require_alike(facts: Sequence[RankFacts], place: RankPlace) -> None:
    """Refuse different ranks, and two ranks on one GPU.

    Raises:
        UserError: ranks do not fit together; all ranks raise the same error.
    """
    for each in facts:
        if each.workers not in (None, place.size):
            ranks = f"{place.size} rank{'s' if place.size > 1 else ''}"
            expected = f"{place.size}, as torchrun has started {ranks}"
            raise SettingError("workers", each.workers, expected, "leave it to torchrun")
    for field, (name, fix) in _ALIKE.items():
        require_same(name, [getattr(each, field) for each in facts], fix)
    first: dict[tuple[str, str], int] = {}  # by host and GPU, the first rank
    for rank, each in enumerate(facts):
        if each.gpu is not None and first.setdefault((each.host, each.gpu), rank) != rank:
            raise SettingError(
                "devices",
                f"{each.gpu} for rank {first[each.host, each.gpu]} and rank {rank}",
                "a device for each rank, as collectives connect no two ranks of one GPU",
                "name more devices, start fewer ranks, or take engine='processes'",
            )


def require_same(
    name: str, values: Sequence[str], fix: str, why: Callable[[int], str] = lambda _: ""
) -> None:
    """Refuse ranks with different values of a fact.

    Args:
        name: the fact, in words.
        values: of the fact, by rank.
        fix: advice for the user.
        why: returns the reason why a rank differs from rank 0, in words.

    Raises:
        UserError: a rank differs from rank 0.
    """
    for rank, got in enumerate(values):
        if got != values[0]:
            raise UserError(
                f"rank {rank} differs from rank 0 in {name}",
                got=f"{printable(got):.40}",
                expected=f"{printable(values[0]):.40}{why(rank)}",
                fix=fix,
            )


def _script_hash() -> str:
    """Return a hash of the file of the program; an empty text if no such file exists."""
    script = current()
    path = getattr(sys.modules["__main__"], "__file__", None) if script is None else script.path
    try:
        return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
