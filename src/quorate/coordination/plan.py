"""The shard plan: which rows of the dataset step t, shard s computes. Pure integers.

Idea 5 of the design: position is a pure function. The order of epoch e depends on (seed, e) alone,
the rows of step t are a slice of it, and the rows of a shard are a slice of those. Nothing here
knows how many devices there are, so a resume, another device count or a reissued shard need no
state beyond the step.

Legend: R rows of the dataset, D rows of an epoch (R, unless they are sampled), B rows of a
batch, V shards, t step, s shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from msgspec import convert, to_builtins

from quorate.coordination.epochs import (
    SHORT,
    Course,
    Round,
    batch_bounds,
    batches_per_epoch,
    steps_per_epoch,
)
from quorate.coordination.keys import hashes, key
from quorate.coordination.sampling import EpochRows, repeats
from quorate.coordination.sampling import Rows as Rows
from quorate.errors import SettingError

_MOST_SIZES = 64  # of steps, kept at a time
WITHOUT_PHASES = Round(("",), (0,))
Order = Callable[[Rows], Rows]  # from the rows of an epoch to the order that they are dealt in
_Size = tuple[int, int, int, str | None]  # begin and end in the order of an epoch, V, phase


def permutation(rows: int, seed: int, epoch: int) -> Rows:
    """Return the order of an epoch: a permutation of 0..rows-1, int64, the same anywhere.

    Row numbers are sorted by SplitMix64 hashes (Steele, Lea & Flood, OOPSLA 2014) of their number,
    started from the epoch's key. A library's own shuffle may change between its releases, and a
    resume on a newer one would then repeat some rows and miss others.
    """
    state = hashes(key("epoch", seed, epoch), np.arange(rows, dtype=np.uint64))
    return np.argsort(state, kind="stable").astype(np.int64, copy=False)


def ordered(rows: Rows, order: Order) -> Rows:
    """Return the rows of an epoch, (D,) int64, in an order of the user's.

    Raises:
        SettingError: it is not each of them as often as it was given.
    """
    dealt = np.asarray(order(rows.copy()))
    counts = np.bincount(rows)
    is_once = len(counts) == len(rows) and bool((counts == 1).all())
    how_often = "once" if is_once else "as often as it was given"
    expected = f"each of the {len(rows):,} rows {how_often}"
    fix = "return the array that order was given, with its elements in another order"
    if dealt.shape != rows.shape or dealt.dtype.kind not in "iu":
        raise SettingError("order", f"{dealt.dtype} of shape {dealt.shape}", expected, fix)
    dealt = np.ascontiguousarray(dealt, dtype=np.int64)  # torch takes no negative strides
    inside = (dealt >= 0) & (dealt < len(counts))
    returned = np.bincount(dealt[inside], minlength=len(counts))
    if not inside.all() or (returned != counts).any():
        wrong = dealt[~inside] if not inside.all() else np.flatnonzero(returned != counts)
        times = 1 if not inside.all() else returned[wrong[0]]
        raise SettingError("order", f"row {wrong[0]}, {times} times", expected, fix)
    return dealt


def home_shards(rank_of: tuple[int, int], shards: int) -> range:
    """Return the home shards of a worker, (rank, number of workers): a contiguous run.

    With more workers than shards, the first V workers have a shard each, and the rest none.
    """
    rank, workers = rank_of[0], min(rank_of[1], shards)
    if rank >= workers:
        return range(0)
    return range(-(-rank * shards // workers), -(-(rank + 1) * shards // workers))


def next_home(
    homes: Callable[[tuple[int, int], int], range], rank_of: tuple[int, int], step: int, end: int
) -> int:
    """Return the first step from ``step`` on with home shards of a worker; at most ``end``."""
    return next((t for t in range(step, end) if homes(rank_of, t)), end)


@dataclass(kw_only=True, eq=False)
class Plan:
    """Rows of every step and shard of a run over one dataset.

    The last batch of an epoch has the remaining rows, so each row counts once per epoch, unless
    ``last`` or ``sampling`` say otherwise. A batch of fewer rows than shards has a shard per row.
    With a round of phases, a step is an update of the round, and several steps may take one batch.

    Raises:
        SettingError: an epoch has too few batches for a phase.
    """

    by_shard: ClassVar[bool] = False
    lookahead = 1  # of so many steps from the next one on a worker may begin one of its own first

    rows: int
    batch_size: int
    shards: int
    seed: int = 0
    shuffle: bool = True
    order: Order | None = None
    last: str = SHORT
    sampling: EpochRows | None = None
    round: Round | None = None  # of phases, if updates are of several
    course: Course = field(default_factory=Course)  # of the plan's run, once that is known

    def __post_init__(self) -> None:
        self.dealt_rows = self.rows if self.sampling is None else self.sampling.rows  # D
        self.batches_per_epoch = batches_per_epoch(self.dealt_rows, self.batch_size, self.last)
        self.steps_per_epoch = (self.round or WITHOUT_PHASES).updates(self.batches_per_epoch)
        self._orders: dict[int, Rows] = {}  # of the newest epochs
        self._repeats: dict[int, Rows] = {}  # likewise, where rows are sampled
        self._sizes: dict[int, _Size] = {}  # by step
        if self.round is not None:
            for name in self.round.phases:
                if self.updates_of(name) == 0:
                    raise SettingError(
                        "batch_size",
                        f"{self.batch_size} of {self.dealt_rows} rows",
                        f"batches enough for phase {name!r}, as a round of "
                        f"{', '.join(self.round.phases)} takes {self.round.batches} batches and "
                        f"an epoch has {self.batches_per_epoch}",
                        "choose a smaller batch, or new_batch=False for phases that may share one",
                    )

    def to_json(self) -> dict[str, Any]:
        """Return the argument of ``from_json``, without order and sampling."""
        plain = ("rows", "batch_size", "shards", "seed", "shuffle", "last")
        return {name: getattr(self, name) for name in plain} | {
            "is_apart": self.by_shard,
            "is_ordered": self.order is not None,
            "sampling": None if self.sampling is None else self.sampling.sha256,
            "round": to_builtins(self.round),
            "course": to_builtins(self.course),
        }

    def phase(self, step: int) -> str | None:
        """Return the phase of step t; None where there are none."""
        return None if self.round is None else self._size(step)[3]

    def updates_of(self, phase: str | None) -> int:
        """Return how many steps of an epoch are of a phase; None: all of them.

        Raises:
            SettingError: there is no such phase.
        """
        if phase is None:
            return self.steps_per_epoch
        if self.round is None:
            raise SettingError("phase", phase, "None, as the loss has no phases", "leave it out")
        if phase not in self.round.phases:
            known = ", ".join(dict.fromkeys(self.round.phases))
            raise SettingError("phase", phase, f"one of {known}", "choose one of them")
        return self.round.updates(self.batches_per_epoch, phase)

    def epoch(self, step: int) -> int:
        """Return the epoch of step t, from 0."""
        return step // self.steps_per_epoch

    def batch_rows(self, step: int) -> int:
        """Return B of step t: ``batch_size``, or the size of the last batch of an epoch."""
        start, stop, _, _ = self._size(step)
        return stop - start

    def shards_of(self, step: int) -> int:
        """Return V of step t: the smaller of ``shards`` and B."""
        return self._size(step)[2]

    def batch(self, step: int) -> Rows:
        """Return the rows of step t in order, (B,) int64."""
        start, stop, _, _ = self._size(step)
        return self._order(self.epoch(step))[start:stop]

    def shard(self, step: int, shard: int) -> Rows:
        """Return the rows of shard s of step t: [s*B//V, (s+1)*B//V) of the batch."""
        return self.shards_from(step, shard, 1)

    def shards_from(self, step: int, shard: int, count: int) -> Rows:
        """Return the rows of neighbouring shards of step t, from shard s on."""
        start, stop, v, _ = self._size(step)
        b, order = stop - start, self._order(self.epoch(step))
        return order[start + shard * b // v : start + (shard + count) * b // v]

    def each_from(self, step: int, shard: int, count: int) -> list[Rows]:
        """Return the rows of each of neighbouring shards of step t, from shard s on."""
        start, stop, v, _ = self._size(step)
        b, order = stop - start, self._order(self.epoch(step))
        ends = [start + s * b // v for s in range(shard, shard + count + 1)]
        return [order[begin:end] for begin, end in pairwise(ends)]

    def repeats(self, step: int, shard: int) -> Rows | None:
        """Return how often each row of a shard was dealt before in the same epoch; None: never."""
        if self.sampling is None or not self.sampling.replacement:
            return None
        epoch, (start, stop, _, _) = self.epoch(step), self._size(step)
        times = self._repeats.get(epoch)
        if times is None:
            times = repeats(self._order(epoch))
            self._repeats = {**dict(list(self._repeats.items())[-1:]), epoch: times}
        b, v = stop - start, self.shards_of(step)
        return times[start + shard * b // v : start + (shard + 1) * b // v]

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the shards of step t of a worker if nothing unusual happens."""
        return home_shards(rank_of, self.shards_of(step))

    def next_home(self, rank_of: tuple[int, int], step: int, end: int) -> int:
        """Return the first step from ``step`` on with home shards of a worker; at most ``end``."""
        return next_home(self.home_shards, rank_of, step, end)

    def row_alone(self, steps: range) -> tuple[int, int] | None:
        """Return the first step and shard, of these steps, with a single row; None: there is none.

        Within an epoch only its last batch has another number of rows than the others: so steps of
        one batch, and of the last batches of two epochs, show all there is.
        """
        epoch, of_batch = self.steps_per_epoch, self.shards if self.by_shard else 1
        end = (steps.start // epoch + 1) * epoch
        for place in (steps.start, end - of_batch, end + epoch - of_batch):
            start = max(steps.start, place)
            for step in range(start, min(start + of_batch, steps.stop)):
                rows, shards = self.batch_rows(step), self.shards_of(step)
                for shard in range(shards) if rows < 2 * shards else ():
                    if (shard + 1) * rows // shards - shard * rows // shards == 1:
                        return step, shard
        return None

    def _size(self, step: int) -> _Size:
        """Return the size of step t. Several threads ask, a dozen times for each step."""
        if (size := self._sizes.get(step)) is None:
            size = self._new_size(step)
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes = {}  # a new dict, as other threads may be reading the old one
            self._sizes[step] = size
        return size

    def _new_size(self, step: int) -> _Size:
        """Compute the size of step t."""
        phase, batch = None, step % self.steps_per_epoch
        if self.round is not None:
            phase, batch = self.round.at(batch)
        start, stop = batch_bounds(batch, self.dealt_rows, self.batch_size, self.last)
        return start, stop, min(self.shards, stop - start), phase

    def _order(self, epoch: int) -> Rows:
        rows = self._orders.get(epoch)
        if rows is None:
            rows = np.arange(self.rows, dtype=np.int64)
            if self.sampling is not None:
                rows = self.sampling.drawn(self.seed, epoch)
            elif self.shuffle:
                rows = permutation(self.rows, self.seed, epoch)
            if self.order is not None:
                rows = ordered(rows, self.order)
            # Two of them: the feed reads ahead across the border between epochs. A new dict, as
            # other threads may be reading the old one.
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: rows}
        return rows


class PlanByShard(Plan):
    """Plan whose steps are the shards of the plain one: for rules that apply them one by one.

    Step u is a shard of a batch of the plain plan, in their order: all shards of a batch, then
    those of the next. An epoch has as many steps as its batches have shards.
    """

    by_shard = True

    def __post_init__(self) -> None:
        super().__post_init__()
        size = (self.dealt_rows, self.batch_size, self.shards)
        self.steps_per_epoch = steps_per_epoch(*size, by_shard=True, last=self.last)
        self._last_shards = self.steps_per_epoch - (self.batches_per_epoch - 1) * self.shards
        self.lookahead = 2 * self.shards

    def _where(self, step: int) -> tuple[int, int, int]:
        """Return the batch and shard of step u in the epoch, and V of the batch."""
        batch, shard = divmod(step % self.steps_per_epoch, self.shards)
        is_last = batch + 1 == self.batches_per_epoch
        return batch, shard, self._last_shards if is_last else self.shards

    def _new_size(self, step: int) -> _Size:
        """Compute the size of step u: a step is a shard."""
        batch, shard, shards = self._where(step)
        start, stop = batch_bounds(batch, self.dealt_rows, self.batch_size, self.last)
        rows = stop - start
        return start + shard * rows // shards, start + (shard + 1) * rows // shards, 1, None

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the single shard of step u at the shard's home, and none elsewhere."""
        _, shard, shards = self._where(step)
        return range(1) if shard in home_shards(rank_of, shards) else range(0)

    def next_home(self, rank_of: tuple[int, int], step: int, end: int) -> int:
        """Return the first step from ``step`` on with home shards of a worker; at most ``end``."""
        while step < end:
            _, shard, shards = self._where(step)
            home = home_shards(rank_of, shards)
            if shard < home.stop:
                return min(end, step + max(0, home.start - shard))
            step += shards - shard  # the next batch
        return end


def from_json(
    arguments: dict[str, Any], order: Order | None = None, sampling: EpochRows | None = None
) -> Plan:
    """Return the plan from a result of ``Plan.to_json``, with the order and sampling, if any.

    Raises:
        SettingError: rows are sampled differently from the plan's.
    """
    kind = PlanByShard if arguments.pop("is_apart") else Plan
    is_ordered, drawn_by = arguments.pop("is_ordered"), arguments["sampling"]
    if drawn_by is not None and (sampling is None or sampling.sha256 != drawn_by):
        fix = "have the script make the same weights each time that it is run"
        got = "none" if sampling is None else "other weights"
        raise SettingError("sampling", got, "those of the coordinator", fix)
    arguments["sampling"] = None if drawn_by is None else sampling
    arguments["course"] = convert(arguments["course"], Course)
    arguments["round"] = convert(arguments["round"], Round | None)
    return kind(**arguments, order=order if is_ordered else None)


def abridged(rows: Rows, most: int = 8) -> str:
    """Return row numbers for a message: ``[4, 17, 2, ... 64 in all]``."""
    shown = ", ".join(map(str, rows[:most].tolist()))
    return f"[{shown}{f', ... {len(rows)} in all' if len(rows) > most else ''}]"
