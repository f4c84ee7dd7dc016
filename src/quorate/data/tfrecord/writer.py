"""Writing a TFRecord file: it is there when it is whole, and not before."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from quorate.data.tfrecord.framing import framed


def write_records(path: str | Path, records: Iterable[bytes]) -> int:
    """Write a file of records; one that is there is replaced.

    Args:
        path: In a directory that exists.
        records: The data of each: a serialized Example, say (``example``).

    Returns:
        How many there were.

    Raises:
        OSError: it cannot be written. Neither then, nor when ``records`` raises, is anything
            changed.
    """
    path = Path(path)
    count = 0
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        new = Path(temporary) / path.name
        with new.open("wb") as file:
            for data in records:
                file.write(framed(data))
                count += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    return count
