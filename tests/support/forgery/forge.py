"""Forging: one of all ways, by a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from support.forgery.files import forged_file, forged_folder
from support.forgery.forged import Forged
from support.forgery.header import forged_header
from support.forgery.record import forged_record
from support.forgery.tensors import forged_tensors
from support.forgery.text import forged_text

WAYS: dict[Callable[[Forged], str], int] = {  # and how often each
    forged_record: 45,
    forged_text: 10,
    forged_header: 20,
    forged_tensors: 15,
    forged_file: 8,
    forged_folder: 2,
}


def forge(path: Path, number: int) -> str:
    """Forge the checkpoint of step 6 in a directory, and return what was done.

    Args:
        path: a sound checkpoint, beside that of step 4.
        number: which forgery; the same one each time.
    """
    chance = random.Random(number)
    forged = Forged(path, chance)
    way = chance.choices([*WAYS], [*WAYS.values()])[0]
    said = way(forged)
    if way not in (forged_file, forged_folder):
        forged.write()
    return said
