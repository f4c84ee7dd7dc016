"""Something else in the place of a file, or of the folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from support.forgery.forged import TENSORS, Forged
from support.forgery.places import PLACES

from quorate.services.checkpoints.files import MARKER, RECORD


def forged_file(forged: Forged) -> str:
    """Something else in the place of a file; what follows the write is not undone by it."""
    chance, path = forged.chance, forged.path
    names = [*TENSORS, RECORD, MARKER]
    name = chance.choice(names)
    target = path / name
    other = path.parent / "step-000000000004" / name
    if name in TENSORS and chance.random() < 0.4:
        # Sound, of the same run, of another step.
        forged.raw[name] = other.read_bytes()
        forged.write()
        return f"{name} is that of step 4"
    forged.write()
    target.unlink()
    ways: dict[str, Callable[[Path], object]] = PLACES | {
        "that of another step": lambda target: None if name in TENSORS else _copied(other, target),
    }
    way = chance.choice([*ways])
    ways[way](target)
    return f"{name} is {way}"


def _copied(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def forged_folder(forged: Forged) -> str:
    forged.write()
    names = ["step-000000000009", "step-6", "step-٠٠٠٠٠٠٠٠٠٠٠٦", "step-0000000000006"]
    name = forged.chance.choice(names)
    forged.path.rename(forged.path.with_name(name))
    return f"its folder is {name}"
