"""The outputs of a pass over a dataset: the rows of each tensor or list, in memory or in files.

Predictions in files are a folder that is either complete, or as before.

TO/prediction.json      rows, nesting of the outputs, file of each output, step of the weights
TO/logits.npy           a tensor of the outputs, all rows (``numpy.load(..., mmap_mode="r")``)
TO/boxes.values.npy     a list of tensors of any size: their elements, one after the other, and
TO/boxes.shapes.npy     (rows, dimensions) int64
TO/texts.jsonl          any other list: a line per row

Rows are written as they arrive; memory does not grow with the dataset. Files are not written
through a memory map: on a full disk, a write to a map ends the process by a signal, while ``write``
raises an OSError.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO
from urllib.parse import quote

import numpy as np
import torch

from quorate.coordination.plan import Plan
from quorate.errors import OutputError, SettingError
from quorate.machine.atomic_file import flush_folder, folder_beside, write_atomically
from quorate.machine.regular_file import exists, is_file, is_folder, reason_against_new_file
from quorate.replica.outputs.collect import Collect
from quorate.replica.outputs.metric import UserMetric
from quorate.replica.outputs.rows import Piece, leaves, nested, structure_of
from quorate.replica.totals import numbers

Place = tuple[str, ...]  # names and indices that lead to a tensor or list of the outputs


class OutputColumn(Protocol):
    """The destination of one tensor or list of the outputs."""

    def put(self, value: Any) -> None:
        """Add the next rows."""

    def finish(self) -> Any:
        """Return the whole column, after all rows were added."""


class Sink(Protocol):
    """The destination of outputs."""

    def put(self, value: Any, rows: int) -> None:
        """Add the outputs of the next rows.

        Raises:
            OutputError: the outputs differ in kind from those before.
        """

    def finish(self, about: dict[str, Any]) -> Any:
        """Return the result for the caller, after all rows were added."""


class Columns:
    """The columns of a prediction: made from the first outputs, and compared with later outputs.

    Args:
        make: makes a column for the first value of a path.
    """

    def __init__(self, make: Callable[[Place, Any], OutputColumn]) -> None:
        self._make = make
        self._columns: list[OutputColumn] = []
        self.paths: list[Place] = []
        self._first: list[Any] = []  # (trailing shape, dtype) of tensors, None for lists
        self.structure: Any = None
        self._rows = 0

    def put(self, value: Any, rows: int) -> None:
        """Add the outputs of the next rows."""
        structure, found = structure_of(value), [*leaves(value)]
        if self.structure is None:
            self.structure = structure
            self.paths = [path for path, _ in found]
            self._first = [_kind(leaf) for _, leaf in found]
            self._columns = [self._make(path, leaf) for path, leaf in found]
        if structure != self.structure:
            raise OutputError(
                "predict",
                got=f"{structure} for rows {self._rows} to {self._rows + rows - 1}",
                expected=f"{self.structure} as for the rows before",
                fix="return the same outputs for every batch",
            )
        for (path, leaf), first, column in zip(found, self._first, self._columns, strict=True):
            if _kind(leaf) != first:
                name = ".".join(path) or "the output"
                raise OutputError(
                    f"predict: {name}",
                    got=f"rows of {_words(_kind(leaf))} in rows {self._rows} to "
                    f"{self._rows + rows - 1}",
                    expected=f"{_words(first)} as before",
                    fix="return a list of rows, [*tensor], where sizes differ",
                )
            column.put(leaf)
        self._rows += rows

    def finish(self, about: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
        """Return the finished columns, nested as the outputs."""
        return nested(self.structure, iter([column.finish() for column in self._columns]))


class _Tensor:
    def __init__(self, rows: int, first: torch.Tensor) -> None:
        self._values = torch.empty((rows, *first.shape[1:]), dtype=first.dtype)
        self._rows = 0

    def put(self, value: torch.Tensor) -> None:
        self._values[self._rows : self._rows + len(value)] = value
        self._rows += len(value)

    def finish(self) -> torch.Tensor:
        return self._values


class _List:
    def __init__(self) -> None:
        self._items: list[Any] = []

    def put(self, value: list[Any]) -> None:
        # Copied out of the parcel's memory: one memory mapping per shard would be too many.
        self._items += [_owned(item) for item in value]

    def finish(self) -> list[Any]:
        return self._items


def in_memory(rows: int) -> Sink:
    """Return a sink that keeps a number of rows in memory, nested as the outputs."""
    return Columns(lambda _, first: _List() if isinstance(first, list) else _Tensor(rows, first))


def _owned(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.clone()
    if isinstance(item, dict):
        return {key: _owned(part) for key, part in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_owned(part) for part in item)
    return item


def _kind(leaf: Any) -> Any:
    return None if isinstance(leaf, list) else (tuple(leaf.shape[1:]), leaf.dtype)


def _words(kind: Any) -> str:
    return "items of a list" if kind is None else f"shape {kind[0]} and {kind[1]}"


# --- files ----------------------------------------------------------------------------------------

MANIFEST = "prediction.json"
_HEADER_BYTES = 256  # size of a .npy file's header, enough for any number of rows


class OutputFiles:
    """A context for writing a folder of predictions; an unfinished folder is removed.

    Args:
        to: the folder. An existing folder has to be empty, or to hold another prediction.
        rows: the final number of rows.

    Raises:
        SettingError: the folder has other contents, or cannot be made.
    """

    def __init__(self, to: Path, rows: int) -> None:
        self._to, self._rows = to, rows
        if exists(to) and (not is_folder(to) or (any(to.iterdir()) and not _is_ours(to))):
            raise SettingError(
                "to", str(to), "a folder that is not there, is empty, or has a prediction",
                "choose another",
            )  # fmt: skip
        if (reason := reason_against_new_file(to)) is not None:  # before rows are computed
            raise SettingError(
                "to", str(to), "a folder that can be made", f"{reason}; choose another"
            )
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            self._folder = folder_beside(to.parent, ".quorate-")
        except OSError as error:
            reason = error.strerror or str(error)
            fix = f"{reason}; choose another"
            raise SettingError("to", str(to), "a folder that can be made", fix) from error
        self._columns = Columns(self._column)
        self._open = ExitStack()  # files

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # a full disk: the error is being raised already
            self._open.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def put(self, value: Any, rows: int) -> None:
        """Write the outputs of the next rows.

        Raises:
            OutputError: the outputs differ in kind from those before, or a file cannot hold them.
            OSError: the disk is full.
        """
        self._columns.put(value, rows)

    def finish(self, about: dict[str, Any]) -> Path:
        """Flush all files, move the folder to its place, and return the path. Blocks."""
        files = self._columns.finish()
        manifest = {"format": 1, "rows": self._rows, "outputs": files, **about}
        write_atomically(self._folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        aside = folder_beside(self._to.parent, ".quorate-")
        try:
            if self._to.exists():
                self._to.rename(aside / "replaced")
            self._folder.rename(self._to)
            flush_folder(self._to.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return self._to

    def _column(self, path: Place, first: Any) -> OutputColumn:
        # A name of the user may hold any character; a dot in a name is no step into a dict.
        name = ".".join(quote(part, safe=" ").replace(".", "%2E") for part in path) or "output"
        if isinstance(first, torch.Tensor):
            return self._array(f"{name}.npy", first.dtype, first.shape[1:])
        if first and all(isinstance(item, torch.Tensor) for item in first):
            values = self._array(f"{name}.values.npy", first[0].dtype, ())
            shapes = self._array(f"{name}.shapes.npy", torch.int64, (first[0].ndim,))
            return _Ragged(values, shapes, first[0])
        file = (self._folder / f"{name}.jsonl").open("x", encoding="utf-8", newline="\n")
        return _LinesFile(self._open.enter_context(file), f"{name}.jsonl")

    def _array(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> _ArrayFile:
        file = (self._folder / name).open("xb", buffering=0)
        return _ArrayFile(self._open.enter_context(file), name, dtype, shape)


class _ArrayFile:
    """A .npy file whose rows are written one after the other; the header is written at the end.

    Args:
        shape: the shape of a row.
    """

    def __init__(
        self, file: RawIOBase, name: str, dtype: torch.dtype, shape: Sequence[int]
    ) -> None:
        try:
            self._dtype = torch.empty(0, dtype=dtype).numpy().dtype
        except TypeError as error:
            raise OutputError(
                f"predict: {name}",
                got=f"{dtype}, which NumPy's files do not support",
                fix="return .float()",
            ) from error
        self._file, self.name, self._shape, self.rows = file, name, shape, 0
        self._file.write(b"\0" * _HEADER_BYTES)

    def put(self, value: torch.Tensor) -> None:
        self.rows += len(value)
        data = value.contiguous().numpy().reshape(-1).view(np.uint8).data
        while data:
            data = data[self._file.write(data) or 0 :]

    def finish(self) -> str:
        about = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        text = f"{ {**about, 'shape': (self.rows, *self._shape)} }".encode("latin1")
        # Version 1.0 of the format: magic, version, length of a text ending with a line feed.
        text = text.ljust(_HEADER_BYTES - 11) + b"\n"
        self._file.seek(0)
        self._file.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
        os.fsync(self._file.fileno())
        self._file.close()
        return self.name


class _Ragged:
    """A list of tensors of any size, of one dtype and number of dimensions."""

    def __init__(self, values: _ArrayFile, shapes: _ArrayFile, first: torch.Tensor) -> None:
        self._kind = (first.dtype, first.ndim)
        self._values, self._shapes = values, shapes

    def put(self, value: list[Any]) -> None:
        for item in value:
            kind = (item.dtype, item.ndim) if isinstance(item, torch.Tensor) else type(item)
            if kind != self._kind:
                raise OutputError(
                    f"predict: {self._values.name}",
                    got=f"an item of {kind} in row {self._shapes.rows}",
                    expected=f"{self._kind} as before",
                )
            self._values.put(item.reshape(-1))
            self._shapes.put(torch.tensor([item.shape], dtype=torch.int64))

    def finish(self) -> list[str]:
        return [self._values.finish(), self._shapes.finish()]


class _LinesFile:
    """A list of values for JSON, written line by line."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file, self._name = file, name

    def put(self, value: list[Any]) -> None:
        for item in value:
            try:
                self._file.write(json.dumps(item, ensure_ascii=False) + "\n")
            except TypeError as error:
                raise OutputError(
                    f"predict: {self._name}",
                    error,
                    fix="a list that is written to files may contain tensors only, or numbers, "
                    "texts, and dicts "
                    "and lists of these",
                ) from error

    def finish(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._name


def _is_ours(folder: Path) -> bool:
    return is_file(folder / MANIFEST)


# --- results of an evaluation, beside sums --------------------------------------------------------


class ShardOutputs:
    """The results collected by an evaluation.

    Args:
        kept: collecting objects by name.
        plan: plan of the evaluation.
    """

    def __init__(self, kept: Mapping[str, Collect | UserMetric], plan: Plan) -> None:
        self._kept, self._plan = kept, plan
        self._names: list[str] | None = None  # names in the shards' outputs
        self._sinks: dict[str, Sink] = {}
        self._states: dict[str, dict[str, Any]] = {}

    def put(self, outputs: Sequence[Piece]) -> None:
        """Add the outputs of the shards of the next step.

        Raises:
            OutputError: shards return outputs of different names.
        """
        for step, shard, values in sorted(outputs, key=lambda piece: piece[:2]):
            if self._names is None:
                self._names = list(values)
            if list(values) != self._names:
                raise OutputError(
                    "totals",
                    got=f"{sorted(self._names)} from one shard and {sorted(values)} from another",
                    expected="the same names from every shard",
                    fix="return each total for every shard",
                )
            for name, value in values.items():
                if isinstance(kept := self._kept[name], Collect):
                    if name not in self._sinks:
                        self._sinks[name] = in_memory(self._plan.rows)
                    self._sinks[name].put(value, len(self._plan.shard(step, shard)))
                else:
                    self._states[name] = kept.merged(self._states.get(name), value)

    def finished(self) -> dict[str, float]:
        """Return the numbers computed from the collected results, by name.

        Raises:
            LossError: a function returned something else than numbers.
            Exception: an error of a function or a metric, with a note that names the total.
        """
        found: dict[str, float] = {}
        for name in self._names or ():
            kept = self._kept[name]
            try:
                if isinstance(kept, Collect):
                    returned = kept.finished(self._sinks[name].finish({}))
                else:
                    returned = kept.finished(self._states[name])
            except Exception as error:
                error.add_note(f"quorate: in totals[{name!r}], of {self._plan.rows:,} rows")
                raise
            found |= numbers(name, returned, found)
        return found
