"""The shard plan: which rows of the dataset step t, shard s computes. Pure integers.

Idea 5 of the design: position is a pure function. The order of epoch e depends on (seed, e) alone,
the rows of step t are a slice of it, and the rows of a shard are a slice of those. Nothing here
knows how many devices there are, so a resume, another device count or a reissued shard need no
state beyond the step.

Legend: R rows of the dataset, B rows of a batch, V shards, t step, s shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorate.coordination.epochs import steps_per_epoch
from quorate.coordination.keys import hashes, key
from quorate.errors import SettingError

Rows = NDArray[np.int64]
Order = Callable[[Rows], Rows]  # from the rows of an epoch to the order that they are dealt in


def permutation(rows: int, seed: int, epoch: int) -> Rows:
    """Return the order of an epoch: a permutation of 0..rows-1, int64, the same anywhere.

    Row numbers are sorted by SplitMix64 hashes (Steele, Lea & Flood, OOPSLA 2014) of their number,
    started from the epoch's key. A library's own shuffle may change between its releases, and a
    resume on a newer one would then repeat some rows and miss others.
    """
    state = hashes(key("epoch", seed, epoch), np.arange(rows, dtype=np.uint64))
    return np.argsort(state, kind="stable").astype(np.int64, copy=False)


def ordered(rows: Rows, order: Order) -> Rows:
    """Return the rows of an epoch, (R,) int64, in an order of the user's.

    Raises:
        SettingError: it is not each of them once.
    """
    dealt = np.asarray(order(rows.copy()))
    expected = f"each of the {len(rows):,} rows once"
    fix = "return the array that order was given, with its elements in another order"
    if dealt.shape != rows.shape or dealt.dtype.kind not in "iu":
        raise SettingError("order", f"{dealt.dtype} of shape {dealt.shape}", expected, fix)
    dealt = np.ascontiguousarray(dealt, dtype=np.int64)  # torch takes no negative strides
    inside = (dealt >= 0) & (dealt < len(rows))
    counts = np.bincount(dealt[inside], minlength=len(rows))
    if not inside.all() or (counts != 1).any():
        wrong = dealt[~inside] if not inside.all() else np.flatnonzero(counts != 1)
        times = 1 if not inside.all() else counts[wrong[0]]
        raise SettingError("order", f"row {wrong[0]}, {times} times", expected, fix)
    return dealt


def home_shards(rank_of: tuple[int, int], shards: int) -> range:
    """Return the home shards of a worker, (rank, number of workers): a contiguous run.

    With more workers than shards the first have one each, and the others none.
    """
    rank, workers = rank_of[0], min(rank_of[1], shards)
    if rank >= workers:
        return range(0)
    return range(-(-rank * shards // workers), -(-(rank + 1) * shards // workers))


class Plan:
    """Rows of every step and shard of a run over one dataset.

    The last batch of an epoch has the rows that are left, so each row counts once per epoch. A
    batch of fewer rows than shards has one shard per row.
    """

    by_shard = False
    lookahead = 1  # of so many steps from the next one on a worker may begin one of its own first

    def __init__(
        self,
        *,
        rows: int,
        batch_size: int,
        shards: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.shards = shards
        self.seed = seed
        self.shuffle = shuffle
        self.order = order
        self.steps_per_epoch = steps_per_epoch(rows, batch_size, shards, by_shard=self.by_shard)
        self._orders: dict[int, Rows] = {}  # of the newest epochs
        self._known: tuple[int, Rows, int] | None = None  # the last step: number, rows, V

    def to_json(self) -> dict[str, int]:
        """Return what ``from_json`` makes this plan of, but for the order: that is a function."""
        return {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "shards": self.shards,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "is_apart": self.by_shard,
            "is_ordered": self.order is not None,
        }

    def epoch(self, step: int) -> int:
        """Return the epoch that step t belongs to, from 0."""
        return step // self.steps_per_epoch

    def batch_rows(self, step: int) -> int:
        """Return B of step t: ``batch_size``, or what is left at the end of an epoch."""
        start = step % self.steps_per_epoch * self.batch_size
        return min(self.batch_size, self.rows - start)

    def shards_of(self, step: int) -> int:
        """Return V of step t: ``shards``, or B where that is less."""
        return min(self.shards, self.batch_rows(step))

    def batch(self, step: int) -> Rows:
        """Return the rows of step t in order, (B,) int64."""
        start = step % self.steps_per_epoch * self.batch_size
        return self._order(self.epoch(step))[start : start + self.batch_size]

    def shard(self, step: int, shard: int) -> Rows:
        """Return the rows of shard s of step t: [s*B//V, (s+1)*B//V) of the batch."""
        known = self._known
        if known is None or known[0] != step:
            self._known = known = (step, self.batch(step), self.shards_of(step))
        _, rows, v = known
        b = len(rows)
        return rows[shard * b // v : (shard + 1) * b // v]

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the shards of step t that a worker computes if nothing unusual happens."""
        return home_shards(rank_of, self.shards_of(step))

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

    def _order(self, epoch: int) -> Rows:
        rows = self._orders.get(epoch)
        if rows is None:
            rows = np.arange(self.rows, dtype=np.int64)
            if self.shuffle:
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

    def __init__(
        self,
        *,
        rows: int,
        batch_size: int,
        shards: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
    ) -> None:
        super().__init__(
            rows=rows,
            batch_size=batch_size,
            shards=shards,
            seed=seed,
            shuffle=shuffle,
            order=order,
        )
        self._last_shards = min(shards, (rows - 1) % batch_size + 1)
        self.lookahead = 2 * shards

    def _where(self, step: int) -> tuple[int, int, int]:
        """Return of which batch of its epoch step u is a shard: which one, of how many."""
        batch, shard = divmod(step % self.steps_per_epoch, self.shards)
        is_last = (batch + 1) * self.batch_size >= self.rows
        return batch, shard, self._last_shards if is_last else self.shards

    def _bounds(self, step: int) -> tuple[int, int]:
        """Return where in the order of its epoch the rows of step u are."""
        batch, shard, shards = self._where(step)
        start = batch * self.batch_size
        rows = min(self.batch_size, self.rows - start)
        return start + shard * rows // shards, start + (shard + 1) * rows // shards

    def batch_rows(self, step: int) -> int:
        """Return how many rows the shard has that step u is."""
        start, stop = self._bounds(step)
        return stop - start

    def shards_of(self, step: int) -> int:  # noqa: ARG002
        """Return 1: a step is a shard."""
        return 1

    def batch(self, step: int) -> Rows:
        """Return the rows of step u in order, int64."""
        start, stop = self._bounds(step)
        return self._order(self.epoch(step))[start:stop]

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the one shard of step u where it is at home, and none elsewhere."""
        _, shard, shards = self._where(step)
        return range(1) if shard in home_shards(rank_of, shards) else range(0)


def from_json(arguments: dict[str, Any], order: Order | None = None) -> Plan:
    """Return the plan that ``Plan.to_json`` described, with its order, if it had one."""
    kind = PlanByShard if arguments.pop("is_apart") else Plan
    is_ordered = arguments.pop("is_ordered")
    return kind(**arguments, order=order if is_ordered else None)


def abridged(rows: Rows, most: int = 8) -> str:
    """Return row numbers for a message: ``[4, 17, 2, ... 64 in all]``."""
    shown = ", ".join(map(str, rows[:most].tolist()))
    return f"[{shown}{f', ... {len(rows)} in all' if len(rows) > most else ''}]"
