"""The source: loads the rows of any shard, with the same bits in every process and repetition.

A sample's randomness is keyed by (seed, epoch, sample index): while ``dataset[i]`` runs, torch's
default generator, Python's ``random`` and NumPy's global generator are seeded for that sample, in
whichever thread or process it is loaded. So a shard loaded twice is identical. Augmentation of
whole batches gets numbers keyed in the same way (``quorate.data.draws``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from quorate.coordination.keys import key
from quorate.coordination.plan import Plan, abridged
from quorate.coordination.sampling import Rows
from quorate.data.columns import DatasetColumns
from quorate.data.draws import Augment, Draws
from quorate.errors import DataError
from quorate.replica.beside.at import at_of, loading
from quorate.replica.fingerprint import fingerprint
from quorate.replica.nested import mapped_leaves
from quorate.replica.streams import Stream
from quorate.replica.transfer import copied
from quorate.replica.turns import Turns

Collate = Callable[[list[Any]], Any]
Ticket = tuple[int, int]  # (step, shard)


class Batch(NamedTuple):
    """The rows of one shard."""

    rows: Rows  # (b,) int64, indices into the dataset
    data: Any  # result of collate
    samples: Sequence[str] = ()  # a hash of each row's content, if requested


class _PartOfPlan(Plan):
    """A plan in which each shard of a step is the same part of the step's rows."""

    def __init__(self, plan: Plan, part: slice) -> None:
        vars(self).update(vars(replace(plan)))  # of a copy: see ``load_part``
        self._plan, self._part = plan, part

    def shard(self, step: int, shard: int) -> Rows:  # noqa: ARG002
        return self._plan.batch(step)[self._part]

    def repeats(self, step: int, shard: int) -> Rows | None:  # noqa: ARG002
        shards = range(self._plan.shards_of(step))
        each = [self._plan.repeats(step, number) for number in shards]
        known = [times for times in each if times is not None]
        return np.concatenate(known)[self._part] if known else None


def length(dataset: Any, name: str = "the dataset") -> int:
    """Return a dataset's number of rows.

    Args:
        name: name of the dataset, for messages.

    Raises:
        DataError: the dataset is not map-style, or is empty.
    """
    map_style = "a map-style dataset, with __getitem__ and __len__"
    if isinstance(dataset, IterableDataset):
        fix = "give its rows numbers: Stream, TarDataset, LinesDataset of quorate.data.streams"
        raise DataError(name, got=type(dataset).__name__, expected=map_style, fix=fix)
    # A text is a sequence of texts, and a class has the methods of its instances.
    is_none = isinstance(dataset, (str, bytes, type))
    if not hasattr(dataset, "__getitem__") or is_none:
        fix = ""
        if hasattr(dataset, "__next__"):  # a generator, or another iterator
            fix = "pass a list of its rows, or quorate.data.streams.Stream(files, rows), whose "
            fix += "rows(file) is such a generator"
        raise DataError(name, got=type(dataset).__name__, expected=map_style, fix=fix)
    if _is_columns(dataset):
        got = f"a {type(dataset).__name__} of {len(dataset)} columns, each of all rows"
        fix = "torch.utils.data.TensorDataset(*tensors) is one"
        raise DataError(name, got=got, expected="a dataset whose item i is row i", fix=fix)
    try:
        rows = len(dataset)
    except (TypeError, NotImplementedError):
        got = f"{type(dataset).__name__} without a length"
        raise DataError(name, got=got, expected=map_style) from None
    except ValueError:  # raised by len() itself
        got = f"{type(dataset).__name__} with a length below zero"
        raise DataError(name, got=got, expected=map_style) from None
    if rows == 0:
        raise DataError(name, got="0 rows", expected="at least one row")
    return rows


def _is_columns(dataset: Any) -> bool:
    """Return whether an object holds tensors of all rows: a dict, or a few tensors of one length.

    As a dataset, a pair of tensors would count as two rows, each with a whole tensor.
    """
    if isinstance(dataset, dict):
        return bool(dataset) and 0 not in dataset
    if not isinstance(dataset, tuple) or not all(
        isinstance(each, torch.Tensor | np.ndarray) and each.ndim for each in dataset
    ):
        return False
    lengths = {len(each) for each in dataset}
    return len(lengths) == 1 and len(dataset) <= 8 and min(lengths) > len(dataset)


class Source:
    """A loader of the rows of any shard: a pure function of (step, shard)."""

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        collate: Collate | None = None,
        augment: Augment | None = None,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self._collate = collate or default_collate
        self._augment = augment
        self.has_defaults = collate is None and augment is None  # the defaults copy rows
        self._tensors = type(dataset) is TensorDataset and collate is None
        self._known_columns: DatasetColumns | None = None
        self._turns = Turns()
        self._draws = False  # whether samples draw from torch's generator
        self.load_s, self.last_s = inf, 0.0  # shortest and last time of a shard
        self.hashes_samples = False  # whether batches have hashes of their rows
        self.is_sent = False  # whether batches are sent to another process, and so copied

    def hashing(self) -> Source:
        """Return a source of the same dataset whose batches have hashes of their rows."""
        source = Source(self.dataset, self.plan, self._collate, self._augment)
        source._tensors, source.hashes_samples = self._tensors, True
        return source

    def load(self, ticket: Ticket) -> Batch:
        """Fetch, collate and augment one shard's rows; may raise any exception of user code."""
        begun = time.monotonic()
        batch = self._whole(ticket)
        self.last_s = time.monotonic() - begun
        if self.last_s < self.load_s:
            self.load_s = self.last_s
        return batch

    def load_part(self, ticket: Ticket, part: slice) -> Batch:
        """Load some rows of a step, possibly of several shards.

        Every row equals the row loaded by ``load``. The time is not recorded.

        Args:
            ticket: the step, and the shard whose random numbers ``collate`` gets.
            part: positions of the rows in the batch of the step.
        """
        # Not ``copy.copy``: Python 3.11 is slower with the attributes of an object whose ``vars``
        # were read, from then on, and each shard needs the source and its plan.
        source = Source(self.dataset, _PartOfPlan(self.plan, part), self._collate, self._augment)
        source._tensors, source.hashes_samples = self._tensors, self.hashes_samples
        source._turns, source._draws = self._turns, self._draws
        return source._whole(ticket)

    def load_run(self, tickets: Sequence[Ticket]) -> list[Batch]:
        """Load neighbouring shards of one step: the rows of a ``TensorDataset`` in one indexing."""
        if len(tickets) == 1 or not self._tensors or self._augment or self.hashes_samples:
            return [self.load(ticket) for ticket in tickets]
        begun = time.monotonic()
        rows = self.plan.each_from(*tickets[0], len(tickets))
        together = self.plan.shards_from(*tickets[0], len(tickets))
        loaded = self._columns().of_shards(together, [*map(len, rows)])
        self.last_s = (time.monotonic() - begun) / len(tickets)
        return [*map(Batch, rows, loaded)]

    def _whole(self, ticket: Ticket) -> Batch:
        rows = self.plan.shard(*ticket)
        if self._tensors and self._augment is None:
            indexed = self._columns().rows(rows)
            if not self.hashes_samples:
                return Batch(rows, indexed)
            return Batch(rows, indexed, self._hashes(lambda: zip(*indexed, strict=True)))
        # A turn also keeps other threads out of the dataset, which may not be thread-safe.
        with loading(at_of(self.plan, ticket[0], rows)), Stream() as stream:
            data, hashes = self._turns.run(lambda reseed: self._load(ticket, stream, reseed))
        if self.has_defaults or self.is_sent:
            return Batch(rows, data, hashes)
        # The user's functions may return memory of the dataset itself: a loss function that writes
        # to its batch would change the dataset, and later epochs would read the change. So copy.
        return Batch(rows, mapped_leaves(data, _owned), hashes)

    def _load(
        self, ticket: Ticket, stream: Stream, reseed: Callable[[int], None]
    ) -> tuple[Any, Sequence[str]]:
        step, shard = ticket
        rows, epoch = self.plan.shard(step, shard), self.plan.epoch(step)
        seed = self.plan.seed

        def rekey(*parts: int | str) -> None:
            reseed(key(*parts))
            stream.reseed(key(*parts))

        if self._tensors:
            batch: Any = self._columns().rows(rows)
            hashes = self._hashes(lambda: zip(*batch, strict=True))
        else:
            batch, hashes = self._collated(ticket, rows.tolist(), stream, rekey)
        if self._augment is None:
            return batch, hashes
        # Reseed torch's own generators too, in case augment draws from them: keyed by the shard.
        rekey("augment", seed, step, shard)
        draws = Draws(seed, epoch, rows, self.plan.repeats(step, shard))
        batch = self._augment(batch, draws)
        if batch is None:
            raise DataError("what augment returned", got=None, expected="the batch")
        return batch, hashes

    def _columns(self) -> DatasetColumns:
        """Return the columns of a ``TensorDataset``; a script may replace the tensors."""
        known = self._known_columns
        if known is None or known.tensors is not self.dataset.tensors:
            self._known_columns = known = DatasetColumns(self.dataset.tensors)
        return known

    def _collated(
        self, ticket: Ticket, rows: list[int], stream: Stream, rekey: Callable[..., None]
    ) -> tuple[Any, Sequence[str]]:
        seed, epoch = self.plan.seed, self.plan.epoch(ticket[0])
        rekey("rows", seed, *ticket)
        samples = self._load_together(rows)
        if samples is None or stream.drawn:
            # Samples that draw random numbers are loaded one by one, each with a separate stream.
            self._draws = self._draws or stream.drawn
            samples = []
            repeats = self.plan.repeats(*ticket)
            for place, row in enumerate(rows):
                times = 0 if repeats is None else int(repeats[place])
                rekey("sample", seed, epoch, row, *([times] if times else []))
                try:
                    samples.append(self.dataset[row])
                except Exception as error:
                    error.add_note(f"quorate: while loading row {row} of the dataset")
                    raise
        hashes = self._hashes(lambda: samples)
        rekey("collate", seed, *ticket)
        try:
            return self._collate(samples), hashes
        except Exception as error:
            of = f"rows {abridged(self.plan.shard(*ticket))}"
            if self._collate is default_collate and isinstance(error, (RuntimeError, TypeError)):
                raise _no_batch(of, error) from error
            error.add_note(f"quorate: while making a batch of {of}")
            raise

    def _hashes(self, samples: Callable[[], Iterable[Any]]) -> Sequence[str]:
        return [fingerprint(sample) for sample in samples()] if self.hashes_samples else ()

    def _load_together(self, rows: list[int]) -> list[Any] | None:
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None or self._draws or self._turns.draws:
            return None
        samples: list[Any] = fetch(rows)
        return samples


def _no_batch(of: str, error: Exception) -> DataError:
    """Return the error about rows that torch's default_collate cannot combine."""
    why = " ".join(str(error).split())
    expected = "rows alike: tensors of one shape, numbers, or lists, tuples and dicts of such"
    fix = "Loading(collate=) takes a function from a list of rows to a batch"
    return DataError(
        "the dataset", got=f"{of}, of which no batch is made ({why})", expected=expected, fix=fix
    )


def _owned(leaf: Any) -> Any:
    """Return a copy of a tensor or an array; any other value unchanged."""
    if isinstance(leaf, torch.Tensor):
        return copied(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
