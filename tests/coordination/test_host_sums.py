"""What hosts add up before it leaves them: whole subtrees, as large as can be; the same bits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.histories import fixed

from quorate.coordination.host_sums import together, vectors, whole_subtrees
from quorate.coordination.members import Members
from quorate.coordination.ownership import leaves
from quorate.coordination.plan import home_shards
from quorate.coordination.tree import tree_sum

SHARDS = st.integers(1, 70)


@st.composite
def some_shards(draw: st.DrawFn) -> tuple[int, set[int]]:
    shards = draw(SHARDS)
    return shards, draw(st.sets(st.integers(0, shards - 1), min_size=1))


@given(some_shards())
@fixed(200)
def test_groups_cover_each_shard_once_and_are_as_large_as_can_be(
    case: tuple[int, set[int]],
) -> None:
    shards, among = case
    groups = {together(shard, among, shards) for shard in among}
    assert sorted(shard for group in groups for shard in group) == sorted(among)
    assert groups == {leaves(node, shards) for node in whole_subtrees(among, shards)}
    for shard in among:
        # Every subtree that has the shard, by looking at all levels.
        whole = [
            own
            for level in range(8)
            if among >= {*(own := leaves((level, shard >> level), shards))}
        ]
        assert len(together(shard, among, shards)) == max(map(len, whole))


@given(SHARDS, st.lists(st.integers(0, 5), min_size=70, max_size=70))
@fixed(100)
def test_sums_made_on_hosts_are_those_made_in_one_place(shards: int, hosts: list[int]) -> None:
    def add(left: str, right: str) -> str:  # tells every order of additions apart
        return f"({left}+{right})"

    held = dict(enumerate(hosts[:shards]))
    nodes = []
    for host in {*held.values()}:
        own = [shard for shard in held if held[shard] == host]
        for level, index in whole_subtrees(own, shards):
            there = leaves((level, index), shards)
            # As an agent adds: shard by shard, in a tree of its own that lacks all others.
            parts = [((0, shard), str(shard)) for shard in there]
            nodes.append(((level, index), tree_sum(parts, shards, add, present=len(there))))
    assert len(nodes) == vectors(held, shards)
    alone = [((0, shard), str(shard)) for shard in range(shards)]
    assert tree_sum(nodes, shards, add) == tree_sum(alone, shards, add)


@given(SHARDS, st.lists(st.integers(0, 5), min_size=70, max_size=70))
@fixed(100)
def test_hosts_never_send_more_than_their_workers_would(shards: int, hosts: list[int]) -> None:
    held = dict(enumerate(hosts[:shards]))
    assert len({*held.values()}) <= vectors(held, shards) <= shards
    assert vectors(dict.fromkeys(held, "one host"), shards) == 1
    assert vectors({shard: shard for shard in held}, shards) == shards


def vectors_of(hosts: int, per_host: int) -> int:
    """With a shard per worker, dealt by the workers' ranks."""
    members, workers = Members(), hosts * per_host
    for worker in range(workers):
        members.join(worker, f"host-{worker % hosts}")  # neighbours by rank, not by number
    held = {
        shard: members.by_number[worker].place
        for worker in range(workers)
        for shard in home_shards(members.rank_of(worker), workers)
    }
    return vectors(held, workers)


def test_a_host_with_a_power_of_two_sends_one_vector() -> None:
    assert vectors_of(8, 8) == 8
    assert vectors_of(8, 6) == 16
    assert vectors_of(8, 1) == 8
    assert vectors_of(1250, 8) == 1250
    late = {shard: str(shard // 8) for shard in range(64) if shard != 63}
    assert vectors(late, 64) + 1 == 11
