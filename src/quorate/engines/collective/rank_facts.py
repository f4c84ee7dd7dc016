"""The hello: what ranks say of themselves before anything else, and whether they fit together.

It goes through the store by which they meet. Ranks that do not fit would hang or fail in the first
thing that they do together: builds of torch that pack tensors differently, a GPU and a CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quorate.engines.collective.interface import route
from quorate.engines.collective.rank_place import RankPlace
from quorate.engines.processes.script import current
from quorate.errors import SettingError, UserError
from quorate.machine import this_host
from quorate.machine.limits import FILE_POLL_S, RANK_SILENCE_S
from quorate.machine.text import printable


class RankFacts(NamedTuple):
    """What one rank says."""

    address: str  # of its host, on the way to the store
    host: str  # see ``this_host.mark``
    device: str  # the kind that it computes on
    torch: str  # the build
    script: str  # a hash of its text
    workers: int | None  # as many as were asked for
    pid: int


ALIKE = {
    "device": (
        "the kind of device",
        "a rank that sees no GPU computes on the CPU, and other bits; `quorate doctor` on its host "
        "says why, --devices cpu takes none on any",
    ),
    "torch": ("the torch build", "install the same one on every host"),
    "script": ("the script's text", "start the same file on every host"),
}


def own_facts(place: RankPlace, device: torch.device, workers: int | None) -> RankFacts:
    """Return what this rank says."""
    return RankFacts(
        route(place.endpoint),
        this_host.mark(),
        device.type,
        torch.__version__,
        _script_hash(),
        workers,
        os.getpid(),
    )


def gather_facts(store: Any, place: RankPlace, own: RankFacts) -> list[RankFacts]:
    """Return what each rank says, in the order of ranks. All ranks call it. Blocks.

    Args:
        store: that all of them have, with no word of ranks before these.
    """
    store.set(f"hello-{place.rank}", json.dumps(own))
    given = store.multi_get([f"hello-{rank}" for rank in range(place.size)])
    return [RankFacts(*json.loads(text)) for text in given]


def require_alike(hellos: Sequence[RankFacts], place: RankPlace) -> None:
    """Refuse ranks that do not fit together. Blocks until the first rank of the host has said so.

    Raises:
        UserError: they do not; the same one on every rank.
    """
    try:
        _require_alike(hellos)
    except UserError:
        # torchrun ends all ranks as soon as one has ended, and only the first of a host prints.
        until = time.monotonic() + RANK_SILENCE_S
        first = hellos[place.rank - place.local_rank].pid
        while place.local_rank and not this_host.has_ended(first) and time.monotonic() < until:
            time.sleep(FILE_POLL_S)
        raise


def _require_alike(hellos: Sequence[RankFacts]) -> None:
    size = len(hellos)
    for each in hellos:
        if each.workers not in (None, size):
            expected = f"{size}, as torchrun has started {size} rank{'s' if size > 1 else ''}"
            raise SettingError("workers", each.workers, expected, "leave it to torchrun")
    for field, (name, fix) in ALIKE.items():
        expected = getattr(hellos[0], field)
        for rank, each in enumerate(hellos):
            if (got := getattr(each, field)) != expected:
                raise UserError(
                    f"rank {rank} differs from rank 0 in {name}",
                    got=f"{printable(got):.40}",
                    expected=f"{printable(expected):.40}",
                    fix=fix,
                )


def _script_hash() -> str:
    """Return a hash of the file of the program, or nothing where there is none."""
    script = current()
    path = getattr(sys.modules["__main__"], "__file__", None) if script is None else script.path
    try:
        return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
