"""Sums of a run: the additions of the tree of shards, and few sums held at a time."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quorate.coordination.host_sums import whole_subtrees
from quorate.coordination.ownership import leaves
from quorate.coordination.run_sums import run_sums
from quorate.coordination.schedules import SCHEDULES, Work
from quorate.coordination.tree import tree_sum

fixed = settings(
    max_examples=80,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

SHARDS = st.integers(1, 40)


def runs(shards: int) -> st.SearchStrategy[range]:
    return st.tuples(st.integers(0, shards - 1), st.integers(1, shards)).map(
        lambda pair: range(pair[0], min(shards, pair[0] + pair[1]))
    )


@fixed
@given(SHARDS.flatmap(lambda shards: st.tuples(st.just(shards), runs(shards))))
def test_each_sum_is_that_of_the_tree(given: tuple[int, range]) -> None:
    """Sums are words here, in which the order of additions can be read."""
    shards, run = given
    plan = run_sums(run, shards)
    held: dict[int, str] = {}
    for shard, (place, additions) in zip(run, plan.puts, strict=True):
        assert place not in held, "it is still wanted"
        held[place] = str(shard)
        for left, right in additions:
            held[left] = f"({held[left]}+{held.pop(right)})"
        assert len(held) <= plan.places
    assert [*plan.sums] == sorted(plan.sums, key=lambda node: leaves(node, shards).start)
    assert sorted(plan.sums) == whole_subtrees(run, shards)
    assert set(held) == set(plan.sums.values())
    for node, place in plan.sums.items():
        below = leaves(node, shards)
        parts = (((0, shard), str(shard)) for shard in below)
        expected = tree_sum(parts, shards, lambda a, b: f"({a}+{b})", len(below))
        assert held[place] == expected
    assert [*plan.first] == [leaves(node, shards).start for node in plan.sums]


def test_few_sums_are_held() -> None:
    for level in range(8):
        assert run_sums(range(1 << level), 1 << level).places == level + 1
    # Of any run: those of its subtrees, and of one of them what is on the way.
    for shards in range(1, 66):
        for first in range(shards):
            plan = run_sums(range(first, shards), shards)
            assert plan.places <= len(plan.sums) + (shards - 1).bit_length()


def test_stages_go_backward_in_the_order_of_shards() -> None:
    for name in ("1f1b", "gpipe", "interleaved"):
        for devices in (1, 2, 3):
            stages = devices * (2 if name == "interleaved" else 1)
            for row in SCHEDULES[name](stages, 9, devices=devices):
                for stage in range(stages):
                    back = [a.shard for a in row if a.work is Work.BACKWARD and a.stage == stage]
                    assert back in ([], [*range(9)])
