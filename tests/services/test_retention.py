"""Which checkpoints stay: against a hand list, and what must hold for any."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quorate.services.checkpoints.retention import Saved, surplus

HOUR = 3600.0


def run(times_h: list[float], **policy: object) -> list[int]:
    """The steps that are there in the end, when they are saved one after the other."""
    there: list[Saved] = []
    options = {"keep": 5, "every_s": None, "best": None} | policy
    for step, at in enumerate(times_h, start=1):
        there.append(Saved(step, at * HOUR))
        gone = surplus(there, step, **options)  # type: ignore[arg-type]
        there = [one for one in there if one.global_step not in gone]
    return [one.global_step for one in there]


def test_the_newest_stay() -> None:
    assert run([0.1 * n for n in range(12)]) == [8, 9, 10, 11, 12]
    assert run([0.0, 0.1], keep=1) == [2]


def test_one_every_so_many_hours_stays_for_ever() -> None:
    # Every 20 minutes for 4 hours, one an hour kept: those at 0, 1, 2, 3 hours, and the last two.
    assert run([n / 3 for n in range(12)], keep=2, every_s=HOUR) == [1, 4, 7, 10, 11, 12]
    # A gap: the first one after it stays.
    assert run([0, 0.5, 3.2, 3.4, 3.9, 4.1, 4.3], keep=1, every_s=HOUR) == [1, 3, 7]


def test_the_best_one_stays() -> None:
    assert run([0.1 * n for n in range(9)], keep=2, best=3) == [3, 8, 9]


def test_newer_ones_are_left_alone() -> None:
    there = [Saved(step, 0.0) for step in (1, 2, 3, 8, 9)]
    assert surplus(there, 3, keep=2, every_s=None, best=None) == {1}


@given(
    # In eighths, so that sums are exact in hours and in seconds.
    st.lists(st.integers(0, 24).map(lambda n: n / 8), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 40).map(lambda n: n / 8),
    st.integers(1, 40),
)
def test_whatever_the_times(gaps_h: list[float], keep: int, every_h: float, best: int) -> None:
    times_h = [sum(gaps_h[: n + 1]) for n in range(len(gaps_h))]
    left = run(times_h, keep=keep, every_s=every_h * HOUR, best=best)
    steps = range(1, len(times_h) + 1)
    assert left[-keep:] == list(steps)[-keep:]
    assert best in left or best not in steps
    assert left[0] == 1
    # No gap of more than the hours asked for where checkpoints were that could have filled it.
    for earlier, later in pairwise(left):
        between = [times_h[s - 1] for s in range(earlier + 1, later)]
        assert all(at < times_h[earlier - 1] + every_h or earlier == best for at in between)
