"""Atomic writing of TFRecord files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from quorate.data.tfrecord.framing import framed
from quorate.machine.atomic_file import write_atomically


def write_records(path: str | Path, records: Iterable[bytes]) -> int:
    """Write a TFRecord file. An existing file is replaced.

    Args:
        path: path of the file, in an existing folder.
        records: the data of each record, such as a serialized ``example``.

    Returns:
        The number of records.

    Raises:
        OSError: the file cannot be written. If writing or ``records`` fails, an existing file is
            unchanged.
    """
    count = 0

    def framed_records() -> Iterator[bytes]:
        nonlocal count
        for data in records:
            yield framed(data)
            count += 1

    write_atomically(Path(path), framed_records())
    return count
