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
from quorate.machine.text import printable


class RankFacts(NamedTuple):
    """Facts about a rank."""

    address: str  # of the host, on the way to the store
    host: str  # see ``this_host.mark``
    device: str  # the kind of device that the rank computes on
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
    address, version = own_address(place.endpoint), torch.__version__
    own = RankFacts(*(address, this_host.mark(), device.type, version, _script_hash(), workers))
    store.set(f"facts-{place.rank}", pack(own))
    texts = store.multi_get([f"facts-{rank}" for rank in range(place.size)])
    return [RankFacts(*unpack(text)) for text in texts]


def require_alike(facts: Sequence[RankFacts], place: RankPlace) -> None:
    """Refuse different ranks.

    Raises:
        UserError: ranks differ; all ranks raise the same error.
    """
    for each in facts:
        if each.workers not in (None, place.size):
            ranks = f"{place.size} rank{'s' if place.size > 1 else ''}"
            expected = f"{place.size}, as torchrun has started {ranks}"
            raise SettingError("workers", each.workers, expected, "leave it to torchrun")
    for field, (name, fix) in _ALIKE.items():
        require_same(name, [getattr(each, field) for each in facts], fix)


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
