"""Something else in the place of a file, or of the folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from support.forgery.forged import TENSORS, Forged

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
    ways: dict[str, Callable[[], None]] = {
        "a FIFO": lambda: os.mkfifo(target),
        "a directory": target.mkdir,
        "a link to /dev/zero": lambda: target.symlink_to("/dev/zero"),
        "a link to a FIFO": lambda: (os.mkfifo(path / "pipe"), target.symlink_to(path / "pipe"))[0],
        "a dangling link": lambda: target.symlink_to(path / "nothing"),
        "a link to itself": lambda: target.symlink_to(target),
        "missing": lambda: None,
        "a sparse terabyte": lambda: (target.write_bytes(b""), os.truncate(target, 1 << 40))[1],
        "that of another step": lambda: None if name in TENSORS else _copied(other, target),
    }
    way = chance.choice([*ways])
    ways[way]()
    return f"{name} is {way}"


def _copied(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def forged_folder(forged: Forged) -> str:
    forged.write()
    names = ["step-000000000009", "step-6", "step-٠٠٠٠٠٠٠٠٠٠٠٦", "step-0000000000006"]
    name = forged.chance.choice(names)
    forged.path.rename(forged.path.with_name(name))
    return f"its folder is {name}"
