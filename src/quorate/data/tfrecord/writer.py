"""Writing a TFRecord file: it is there when it is whole, and not before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from quorate.data.tfrecord.framing import framed
from quorate.machine.atomic_file import write_atomically


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
    count = 0

    def framed_records() -> Iterator[bytes]:
        nonlocal count
        for data in records:
            yield framed(data)
            count += 1

    write_atomically(Path(path), framed_records())
    return count
