"""Writing a file that is there when it is whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8 beside its place, flush it to the disk, and move it there.

    Raises:
        OSError: it cannot be written; what was in its place is as it was.
    """
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        with fresh.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
