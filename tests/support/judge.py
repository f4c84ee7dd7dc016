"""The judge: what must hold after every event of a simulated run, by its own books."""

from __future__ import annotations

import math
from collections import Counter

from support.run_books import Books

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import Abort, Applied, Done, Event, Finish


class Judge(Books):
    """Checks invariants. Who inherits from it calls ``_check`` when effects are carried out."""

    coordinator: Coordinator
    finish: Finish | None
    abort: Abort | None
    fates: dict[str, Counter[int]]  # of every shard: worker -> how many
    staleness: list[int]  # of every gradient applied
    _attempts: int
    _wake_at: float | None
    _to_tell: set[tuple[int, int, int]]  # who computes (t, s) in vain
    _closed: set[int]  # steps applied
    _fates_before: dict[str, Counter[int]]
    _staleness_before: list[int]

    def _check(self, event: Event) -> None:
        """What must hold when all effects of an event are carried out."""
        if isinstance(event, Done) and self._results[event.worker].pending:
            raise self._violation(f"neither kept nor discarded: the result of {event}")
        if self._to_tell:
            raise self._violation(f"these compute in vain, untold: {sorted(self._to_tell)}")
        if isinstance(event, Applied) or self.finish is not None:
            self._check_books()
        if self.finish is not None or self.abort is not None:
            return
        for number, step in self._open.items():
            for shard, failed_on in step.failed_on.items():
                if len(set(failed_on)) >= self._attempts:
                    raise self._violation(f"shard {shard} of {number} failed on {failed_on}")
        silent_at = math.inf
        if self._timeout_s is not None:
            silent_at = min(map(self._silent_at, self._workers.values()), default=math.inf)
        # One that is due already must be looked at on the next tick, which has to come.
        if silent_at < math.inf and (
            self._wake_at is None or self._wake_at > max(silent_at, self.now)
        ):
            raise self._violation(f"no tick is asked for at {silent_at}, but at {self._wake_at}")
        if self._applying:
            return
        self._check_idle()
        for step in filter(self._is_ready, self._open):
            raise self._violation(f"step {step} is ready, and its update is put off")

    def _check_idle(self) -> None:
        # To give one that is being ended another shard, or not to, are both fine.
        idle = [w for w, m in self._workers.items() if m.task is None and not m.is_replaced]
        if idle and (idle := self._have_work(idle)):
            loose = {step: self._loose(step) for step in self._open}
            raise self._violation(f"workers {idle} are idle, and nobody has {loose}")

    def _is_ready(self, step: int) -> bool:
        """Whether enough is in, and all other open steps are still fresh enough after this one.

        Of the updates from the next one on, so many must be made by each one's last moment.
        """
        if len(self._kept(step)) < self.rule.needed(self.shards_of(step)):
            return False
        if self.rule.staleness == math.inf:
            return True
        others = [versions for t in self._open if t != step and (versions := self._versions(t))]
        last = [min(versions) + self.rule.staleness for versions in others]
        return all(sum(each <= end for each in last) <= end - self.applied for end in last)

    def _check_books(self) -> None:
        """What is saved with a checkpoint: the position, and the tally."""
        left_open = set(range(max(self._closed, default=-1) + 1)) - self._closed
        if self.coordinator.left_open != sorted(left_open):
            raise self._violation(
                f"{sorted(left_open)} are left open, not {self.coordinator.left_open}"
            )
        tally = self.coordinator.tally.to_json()
        for fate, count in self.fates.items():
            total = count + self._fates_before[fate]
            if {worker: n for worker, n in enumerate(tally[fate]) if n} != dict(total):
                raise self._violation(f"{fate} are {dict(total)}, not {tally[fate]}")
        before = self._staleness_before
        stale = [sum([before[0], *self.staleness]), max([before[1], *self.staleness])]
        if tally["staleness"] != stale:
            raise self._violation(f"staleness is {stale}, not {tally['staleness']}")
