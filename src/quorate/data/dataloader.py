"""The parts of a ``torch.utils.data.DataLoader``: dataset, collate function, order, processes.

A loader is never iterated: it returns batches in sequence, to a single process, and cannot return a
batch by position. Its parts allow access by position; a part that does not is refused. Arguments of
the trainer have priority over the loader.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from quorate.coordination.epochs import DROP
from quorate.coordination.sampling import EpochRows, Rows, Sampling
from quorate.data.loading import DatasetConfig, Loading
from quorate.data.streams.stream import Stream
from quorate.errors import SettingError

# Settings of a loader for fetching rows; quorate fetches rows by other means.
FETCHING = {"pin_memory": False, "worker_init_fn": None, "generator": None}
NO_MATTER = (SequentialSampler, RandomSampler, DistributedSampler)  # each row counts once


def dataset_of(given: Any) -> Any:
    """Return the dataset in a loader; return any other object unchanged."""
    return given.dataset if isinstance(given, DataLoader) else given


def read_dataset_config(
    given: Any,
    loading: Loading,
    *,
    shuffle: bool | None = None,
    batch_size: int | None = None,
    name: str = "dataset",
) -> DatasetConfig:
    """Return the parts of a loader; treat any other object as a dataset.

    Args:
        given: a dataset or a loader.
        loading: the trainer's settings. Settings left open are taken from the loader.
        shuffle: the user's choice; None: the loader's choice, or True for a dataset.
        batch_size: the trainer's batch size. None: rows are evaluated, each once, in any order.
        name: name of the argument, for messages.

    Raises:
        SettingError: a part of the loader does not allow access by position.
    """
    dataset = dataset_of(given)
    if batch_size is not None and loading.order is None and isinstance(dataset, Stream):
        loading = replace(loading, order=dataset.order)  # a Stream can be read in no other order
    if not isinstance(given, DataLoader):
        return DatasetConfig(given, loading, shuffle is None or shuffle)
    _require_plain(given, name)
    took: list[str] = ["its dataset"]
    left: list[str] = [known for known, usual in FETCHING.items() if getattr(given, known) != usual]
    loading = _collating(given, loading, took, left)
    size, drops, sampler = _batches(given, name)
    if batch_size is None:
        if not isinstance(sampler, NO_MATTER) or not _has_every_row(sampler, given.dataset):
            fix = "pass the dataset, or a torch.utils.data.Subset of it"
            raise _refused(name, type(sampler).__name__, "no sampler for an evaluation", fix)
        left += ["drop_last (every row is evaluated)"] if drops else []
        if given.num_workers not in (0, loading.processes):
            left.append(f"num_workers={given.num_workers} (processes={loading.processes} counts)")
        return DatasetConfig(given.dataset, loading, False, _line(name, took, left))
    loading = _loaded_by(given, loading, took, left)
    if size != batch_size:
        left.append(f"batch_size={size} (Trainer's {batch_size} counts)")
    if drops and loading.last is None:
        loading = replace(loading, last=DROP)
        took.append(f"drop_last as last={DROP!r}")
    elif drops and loading.last != DROP:
        left.append(f"drop_last (last={loading.last!r} counts)")
    if loading.sampling is not None or shuffle is not None:
        given_by = "sampling=" if loading.sampling is not None else f"shuffle={shuffle}"
        if given_by != f"shuffle={_shuffles(sampler)}":
            left.append(f"{type(sampler).__name__} ({given_by} counts)")
        line = _line(name, took, left)
        return DatasetConfig(given.dataset, loading, shuffle is None or shuffle, line)
    if (shuffles := _shuffles(sampler)) is not None and _has_every_row(sampler, given.dataset):
        took.append(f"its order as shuffle={shuffles}")
        if isinstance(sampler, DistributedSampler):
            left.append("the shares of DistributedSampler (rows are dealt to workers here)")
        return DatasetConfig(given.dataset, loading, shuffles, _line(name, took, left))
    sampling = _sampling(sampler, len(given.dataset), name)  # type: ignore[arg-type]
    took.append(f"{type(sampler).__name__} as sampling={sampling!r}")
    loading = replace(loading, sampling=sampling)
    return DatasetConfig(given.dataset, loading, True, _line(name, took, left))


class SamplerOrder:
    """The rows of each epoch in the order of a user's sampler; see ``EpochRows``.

    Args:
        sampler: must return the same rows in every iteration after ``set_epoch(epoch)``, or in
            every iteration if the sampler has no such method.
        rows: R, number of rows of the dataset.
        name: name of the argument, for messages.

    Raises:
        SettingError: the sampler returns different rows in each iteration, or invalid rows.
    """

    replacement = True  # an epoch may contain a row twice

    def __init__(self, sampler: Any, rows: int, name: str) -> None:
        self._sampler = sampler
        self._lock = threading.Lock()  # towers share one sampler
        self._of, self._name = rows, name
        first, _, again = self._asked(0), self._asked(1), self._asked(0)
        if not np.array_equal(first, again):
            fix = (
                "give it a method set_epoch(epoch) from which alone its order follows, or pass "
                "Loading(sampling=) or Loading(order=)"
            )
            got = f"{type(sampler).__name__}, which gives other rows each time"
            raise _refused(name, got, "one that can be asked for any epoch again", fix)
        self.rows = len(first)
        if not self.rows:
            raise _refused(name, type(sampler).__name__, "one that gives rows", "it gives none")
        content = hashlib.sha256(f"{type(sampler).__qualname__} {rows} ".encode())
        content.update(first.astype("<i8").tobytes())
        self.sha256 = content.hexdigest()

    def __repr__(self) -> str:
        return f"{self.rows:,} rows in its order"

    def require_rows(self, rows: int) -> None:
        """Check that a dataset has the expected number of rows.

        Raises:
            SettingError: the dataset has a different number of rows.
        """
        if rows != self._of:
            raise _refused(self._name, f"{rows:,} rows", f"{self._of:,}", "pass the same dataset")

    def drawn(self, seed: int, epoch: int) -> Rows:  # noqa: ARG002
        """Return the rows of an epoch in the sampler's order, (D,) int64.

        Raises:
            SettingError: the sampler returns a different number of rows than in the first epoch.
        """
        rows = self._asked(epoch)
        if len(rows) != self.rows:
            got = f"{len(rows):,} rows in epoch {epoch}"
            fix = "have it give as many in each epoch"
            raise _refused(self._name, got, f"{self.rows:,} as in the first", fix)
        return rows

    def _asked(self, epoch: int) -> Rows:
        with self._lock:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            given = list(self._sampler)
        try:
            rows = np.array([int(row) for row in given], dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            got = f"{type(self._sampler).__name__}, which gives no row numbers"
            raise _refused(self._name, got, "rows by their numbers", str(error)) from error
        if len(wrong := rows[(rows < 0) | (rows >= self._of)]):
            got, expected = f"row {wrong[0]:,}", f"rows from 0 to {self._of - 1:,}"
            raise _refused(self._name, got, expected, "they are those of its dataset")
        return rows


def _require_plain(loader: DataLoader[Any], name: str) -> None:
    if isinstance(loader.dataset, IterableDataset):
        got, expected = type(loader.dataset).__name__, "a dataset that can be asked by position"
        fix = "see quorate.data.streams: Stream, TarDataset, LinesDataset"
        raise _refused(name, got, expected, fix)
    if type(loader).__iter__ is not DataLoader.__iter__:
        fix = "pass its dataset, and Loading(collate=)"
        got, expected = f"{type(loader).__name__} with an __iter__ of its own", "torch's"
        raise _refused(name, got, expected, fix)


def _batches(loader: DataLoader[Any], name: str) -> tuple[int, bool, Any]:
    """Return the batch size, whether the last rows are dropped, and the sampler."""
    if loader.batch_size is not None:
        return loader.batch_size, loader.drop_last, loader.sampler
    inner = loader.batch_sampler
    if type(inner) is BatchSampler:
        return inner.batch_size, inner.drop_last, inner.sampler
    if inner is None:
        fix = "pass a dataset of rows: Trainer(batch_size=) makes batches of them"
        raise _refused(name, "batch_size=None", "rows, one by one", fix)
    fix = "pass the dataset, and Loading(order=), which may put rows of like length together"
    raise _refused(name, f"batch_sampler={type(inner).__name__}", "batches by position", fix)


def _collating(
    loader: DataLoader[Any], loading: Loading, took: list[str], left: list[str]
) -> Loading:
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    if collate in (default_collate, default_convert):
        return loading
    called = f"collate_fn={getattr(collate, '__name__', type(collate).__name__)}"
    if loading.collate is not None:
        if loading.collate is not collate:
            left.append(f"{called} (collate= counts)")
        return loading
    took.append(called)
    return replace(loading, collate=collate)


def _loaded_by(
    loader: DataLoader[Any], loading: Loading, took: list[str], left: list[str]
) -> Loading:
    if not loader.num_workers:
        return loading
    if loading.processes:
        if loading.processes != loader.num_workers:
            counts = f"processes={loading.processes} counts"
            left.append(f"num_workers={loader.num_workers} ({counts})")
        return loading
    took.append(f"num_workers={loader.num_workers} as processes={loader.num_workers}")
    return replace(loading, processes=loader.num_workers)


def _shuffles(sampler: Any) -> bool | None:
    """Return whether an order is shuffled; None: neither shuffled nor the dataset's order."""
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler:
        return True
    return bool(sampler.shuffle) if type(sampler) is DistributedSampler else None


def _has_every_row(sampler: Any, dataset: Any) -> bool:
    """Return whether an epoch has every row exactly once."""
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(dataset)
    return True


def _sampling(sampler: Any, rows: int, name: str) -> EpochRows:
    if type(sampler) is WeightedRandomSampler:
        number, replacement = sampler.num_samples, sampler.replacement
        return Sampling(sampler.weights, rows=number, replacement=replacement)
    if type(sampler) is RandomSampler:
        number, replacement = sampler.num_samples, sampler.replacement
        return Sampling(np.ones(rows), rows=number, replacement=replacement)
    if type(sampler) is SubsetRandomSampler:
        chosen = np.asarray(list(sampler.indices), dtype=np.int64)
        if len(np.unique(chosen)) < len(chosen) or not ((chosen >= 0) & (chosen < rows)).all():
            fix = "or Loading(sampling=) with a weight for each row"
            raise _refused(name, "SubsetRandomSampler", "each index once, a row's number", fix)
        weights = np.zeros(rows)
        weights[chosen] = 1.0
        return Sampling(weights, replacement=False)
    return SamplerOrder(sampler, rows, f"{name}.sampler")


def _line(name: str, took: list[str], left: list[str]) -> str:
    not_used = f"; not used: {', '.join(left)}" if left else ""
    return f"{name} is a DataLoader; used: {', '.join(took)}{not_used}"


def _refused(name: str, got: str, expected: str, fix: str) -> SettingError:
    return SettingError(f"{name}: DataLoader", got, expected, fix)
