"""What has to be the same on all ranks, before the first step."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from quorate.data.source import Source
from quorate.errors import UserError
from quorate.training.collective.member import Member
from quorate.training.crew import Crew
from quorate.transports.job import data_fingerprint
from quorate.transports.processes.script import current


def identity(member: Member, source: Source, crew: Crew) -> dict[str, str]:
    """Return what has to be the same on all ranks, in words and hashes."""
    settings = {name: repr(value) for name, value in crew.recipe.facts().items()}
    return {
        **settings,
        "the torch build": torch.__version__,
        "the script": script_hash(),
        "the first rows of the dataset": data_fingerprint(source),
        "the gradient of the first shard": member.fingerprint(),
    }


def script_hash() -> str:
    """Return a hash of the file of the program, or nothing where there is none."""
    script = current()
    path = getattr(sys.modules["__main__"], "__file__", None) if script is None else script.path
    try:
        return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def compare(given: list[bytes]) -> None:
    """Compare what each rank gave, by rank.

    Raises:
        UserError: one differs from rank 0.
    """
    first, *others = (json.loads(text) for text in given)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                raise UserError(
                    f"rank {rank} differs from rank 0 in {name}: got {other[name]:.40}, expected "
                    f"{value:.40}; start the same script with the same arguments, data and "
                    "packages on every rank"
                )
