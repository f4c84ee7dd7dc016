"""A map-style dataset over files that can only be read from the start.

A row is number j of file f, and files are counted. Rows are read in windows (consecutive rows of a
file), which stay in memory while an epoch uses them. A window is a pure function of (file, window)
as long as the file is unchanged: random numbers drawn while a window is read are keyed by (file,
window).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from quorate.coordination.keys import key
from quorate.data.streams.windows import Windows
from quorate.errors import DataError, SettingError
from quorate.replica.shared import generators
from quorate.replica.streams import Stream as Draws
from quorate.settings import function, integer

LOOKED_AT = 64  # loads of windows before the access pattern is judged
FEW = 256  # rows read per row used from which on the access pattern counts as scattered

_END = object()


class Stream(Dataset[Any]):
    """The rows of files that can only be read from front to back.

    By default ``fit`` uses an order of windows: files in a new order in each epoch, and rows
    shuffled within a window. ``Loading(order=)`` overrides this order. Every worker process reads
    all files. If a format can find rows by number, use a map-style dataset for that format instead.

    Args:
        files: arguments for ``rows``: paths, URLs, or numbers of shards.
        rows: ``rows(file)`` returns the rows of a file, always in the same order. Called when an
            epoch reaches the file, in each worker process.
        counts: number of rows in each file. Default: read each file once, in every process, to
            count the rows. To save that time, pass ``stream.counts`` of an earlier run.
        decode: a function from an item of ``rows`` to a sample. Called only for the rows of the
            process. May draw random numbers, which depend on row and epoch. Default: the item is
            the sample.
        window: number of rows of a file that are shuffled and held in memory at a time. Increase
            ``window`` for a better shuffle. Default: 1024.
        files_at_once: number of files that are read in parallel. Default: 1.
        skips: whether to call ``rows(file, start)``, which begins at row ``start``. A resumed run,
            or another worker, then does not read the rows before. Default: False.

    Raises:
        DataError: a file has another number of rows than in ``counts``, or all files together have
            no row.
        SettingError: a value is not valid.
    """

    def __init__(
        self,
        files: Sequence[Any],
        rows: Callable[..., Iterable[Any]],
        *,
        counts: Sequence[int] | None = None,
        decode: Callable[[Any], Any] | None = None,
        window: int = 1024,
        files_at_once: int = 1,
        skips: bool = False,
    ) -> None:
        self._files = list(files)
        self._rows = rows
        self._decode = decode
        self._window = integer("Stream.window", window, least=1)
        self._skips = skips
        function("Stream.rows", rows, "from a file to its rows", 2 if skips else 1)
        self.counts = self._counted() if counts is None else [int(count) for count in counts]
        if len(self.counts) != len(self._files) or min(self.counts, default=0) < 0:
            got, expected = (
                f"{len(self.counts)} counts",
                f"one for each of {len(self._files)} files",
            )
            raise SettingError("Stream.counts", got, expected, "pass stream.counts of a first run")
        # The number of each file's first row, and the total number of rows at the end.
        self.starts: NDArray[np.int64] = np.cumsum([0, *self.counts], dtype=np.int64)
        if not len(self):
            raise DataError("Stream", got="no row in any file", expected="at least one")
        self.order = Windows(self.starts, rows=self._window, files=files_at_once)
        # An epoch uses one window of each of these files; the next windows are read ahead.
        self._most_open = self.order.files + 1
        self._lock = threading.RLock()
        self._forget()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> Any:
        """Return the sample of a row; reads the row's window unless the window is in memory.

        Raises:
            IndexError: the row does not exist.
            DataError: the file has changed since its rows were counted.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row:,} of {len(self):,}")
        row %= len(self)
        file = int(np.searchsorted(self.starts, row, side="right")) - 1
        window, place = divmod(row - int(self.starts[file]), self._window)
        with self._lock:
            record = self._window_of(file, window)[place]
        if self._decode is None:
            return record
        try:
            return self._decode(record)
        except Exception as error:
            number = row - int(self.starts[file])
            error.add_note(f"quorate: in {self._name(file)}, row {number:,}")
            raise

    def _forget(self) -> None:
        """Reset all state: a process never uses windows or files of another process."""
        self._pid = os.getpid()
        self._there: OrderedDict[tuple[int, int], list[Any]] = OrderedDict()  # windows
        self._open: OrderedDict[int, tuple[int, Iterator[Any]]] = OrderedDict()  # (next row, rows)
        # Close open generators before the interpreter ends: later, modules needed for closing are
        # gone, and the generators print errors (pyarrow's, for Parquet).
        weakref.finalize(self, self._open.clear)
        self._asked, self._read, self._loads = 0, 0, 0

    def _window_of(self, file: int, window: int) -> list[Any]:
        if self._pid != os.getpid():  # a fork: parent and child share descriptors
            self._forget()
        self._asked += 1
        if (found := self._there.get((file, window))) is not None:
            self._there.move_to_end((file, window))
            return found
        rows = self._loaded(file, window)
        self._there[file, window] = rows
        while len(self._there) > 2 * self._most_open:
            self._there.popitem(last=False)
        self._read, self._loads = self._read + len(rows), self._loads + 1
        if self._loads == LOOKED_AT and self._read > FEW * self._asked:
            logging.getLogger("quorate").warning(
                "a Stream reads %d rows for each row that training uses, because the order jumps "
                "between files; remove Loading(order=), or pass the stream's own `order`",
                self._read // self._asked,
            )
        return rows

    def _loaded(self, file: int, window: int) -> list[Any]:
        """Read a window, from the file's open position or from the beginning."""
        start = window * self._window
        at, rows = self._open.pop(file, (0, None))
        if rows is None or at > start:
            at, rows = self._begun(file, start)
        while True:
            wanted = min(self._window, self.counts[file] - at)
            found = self._taken(rows, wanted, file, at // self._window)
            at += len(found)
            if len(found) < wanted:
                raise self._other(file, f"{at:,} rows")
            if at == self.counts[file] and next(rows, _END) is not _END:
                raise self._other(file, "more rows")
            if at > start:
                break
        if at < self.counts[file]:
            self._open[file] = at, rows
            while len(self._open) > self._most_open:
                self._open.popitem(last=False)
        return found

    def _begun(self, file: int, start: int) -> tuple[int, Iterator[Any]]:
        """Return an iterator over the rows of a file, from the beginning or from a start row."""
        if self._skips:
            return start, iter(self._rows(self._files[file], start))
        return 0, iter(self._rows(self._files[file]))

    def _taken(self, rows: Iterator[Any], count: int, file: int, window: int) -> list[Any]:
        """Return the next rows. Their random numbers are keyed by file and window."""
        seed = key("stream", file, window)
        with Draws() as draws, generators.kept():
            draws.reseed(seed)
            generators.reseed(seed)
            return list(islice(rows, count))

    def _counted(self) -> list[int]:
        """Count the rows of each file by reading the file."""
        counts = []
        for number in range(len(self._files)):
            with Draws() as draws, generators.kept():
                draws.reseed(key("stream", number))
                counts.append(sum(1 for _ in self._begun(number, 0)[1]))
        return counts

    def _other(self, file: int, got: str) -> DataError:
        expected, fix = f"{self.counts[file]:,}, as counts says", "count again: leave counts out"
        return DataError(self._name(file), got=got, expected=expected, fix=fix)

    def _name(self, file: int) -> str:
        return f"Stream, file {file} ({self._files[file]})"
