"""TFRecord files as a map-style dataset, with access to any record by number."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from quorate.data.tfrecord.example import Features
from quorate.data.tfrecord.framing import HEAD, OVERHEAD_BYTES, TAIL, checksum, length_in
from quorate.data.tfrecord.index import Index, index, record_name
from quorate.errors import DataError
from quorate.machine.regular_file import regular_descriptor


class TFRecordDataset(Dataset[Any]):
    """The records of one or more TFRecord files.

    Every read checks the length of the record against the index, and both checksums. No file stays
    open, and nothing is shared: any thread, and any copy in another process, may read at any time.

    Args:
        paths: a path, or a list of paths.
        parse: a function from the bytes of a record to a sample: ``Features`` for tf.train.Example,
            or your own function.

    Raises:
        DataError: a file is missing, damaged, cut short, compressed or not a TFRecord file, or all
            files together have no record.
    """

    def __init__(
        self, paths: str | Path | Sequence[str | Path], parse: Callable[[bytes], Any]
    ) -> None:
        given = [paths] if isinstance(paths, (str, Path)) else list(paths)
        self._parse = parse.values if isinstance(parse, Features) else parse
        self._finish = parse.samples if isinstance(parse, Features) else _as_they_are
        self._files = [index(Path(path)) for path in given]
        # Of each file, the number of its first record in the whole; at the end, how many there are.
        self._starts = np.cumsum([0, *map(len, self._files)])
        if not len(self):
            where = ", ".join(str(file.path) for file in self._files) or "paths"
            raise DataError(where, got="no record", expected="at least one", offset=0)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> Any:
        """Return the sample of a record.

        Raises:
            IndexError: there is no such record.
            DataError: it is damaged, or not what ``parse`` reads, or the file was changed.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"record {row:,} of {len(self):,}")
        return self.__getitems__([row % len(self)])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return the samples of several records. Opens each file once; raises as ``[row]`` does."""
        if not rows:
            return []
        if min(rows) < 0 or max(rows) >= len(self):
            raise IndexError(f"records {min(rows):,} to {max(rows):,} of {len(self):,}")
        files = np.searchsorted(self._starts, rows, side="right") - 1
        samples: list[Any] = [None] * len(rows)
        for number in np.unique(files).tolist():
            file, first = self._files[number], int(self._starts[number])
            positions = np.flatnonzero(files == number).tolist()
            with _Open(file) as records:
                for position in positions:
                    record = int(rows[position]) - first
                    samples[position] = self._sample(file, record, records.read(record))
        return self._finish(samples)

    def _sample(self, file: Index, record: int, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DataError as error:
            where, at = record_name(file.path, record), int(file.offsets[record])
            got = f"{error.where}: {error.got}"
            raise DataError(where, got=got, expected=error.expected, offset=at) from error
        except Exception as error:
            at = int(file.offsets[record])
            error.add_note(f"quorate: in {record_name(file.path, record)}, at byte {at:,}")
            raise


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


class _Open:
    """A file, open to read records from."""

    def __init__(self, file: Index) -> None:
        self._file = file
        self._fd = -1

    def __enter__(self) -> _Open:
        path, wanted = self._file.path, "a readable file"
        try:
            self._fd = regular_descriptor(path)
            stat = os.fstat(self._fd)
        except OSError as error:
            raise DataError(path, got=error.strerror or error, expected=wanted) from error
        if (stat.st_size, stat.st_mtime_ns) != (self._file.size, self._file.changed_ns):
            os.close(self._fd)
            got = "a file that was changed since it was indexed"
            raise DataError(path, got=got, expected="the same one", fix="start again")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, record: int) -> bytes:
        """Read the data of a record."""
        start, end = self._file.offsets[record : record + 2].tolist()
        # Not through a mapping of the file: one that is cut meanwhile would end the process.
        try:
            content = os.pread(self._fd, end - start, start)
        except OSError as error:
            raise self._wrong(record, error.strerror or error, "a readable file") from error
        if len(content) < end - start:
            got = f"the end of the file after {len(content):,} bytes"
            raise self._wrong(record, got, f"{end - start:,} bytes")
        length = length_in(content[: HEAD.size])
        if length != end - start - OVERHEAD_BYTES:
            got = "a length with a wrong checksum" if length is None else f"a length of {length:,}"
            raise self._wrong(record, got, f"{end - start - OVERHEAD_BYTES:,}, as it was")
        data = content[HEAD.size : -TAIL.size]
        if TAIL.unpack_from(content, len(content) - TAIL.size)[0] != checksum(data):
            raise self._wrong(record, "data with a wrong checksum", "a right one")
        return data

    def _wrong(self, record: int, got: object, expected: str) -> DataError:
        at = int(self._file.offsets[record])
        fix = "the file is damaged: get it again"
        where = record_name(self._file.path, record)
        return DataError(where, got=got, expected=expected, offset=at, fix=fix)
