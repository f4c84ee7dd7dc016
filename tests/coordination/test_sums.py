"""Sums: a fixed order of additions, whoever adds: workers, hosts, ranks of a collective.

An addition of words shows its order. Legend: V shards, N workers or ranks.
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import fixed
from support.shown_sums import add, leaf, whole_sum

from quorate.coordination.ownership import (
    BLOCK,
    Hosts,
    blocks_of_bucket,
    buckets,
    merged,
    most,
    slices,
    slowest_factor,
    together,
    vectors,
)
from quorate.coordination.plan import home_shards
from quorate.coordination.tree import Node, TreeSum, leaves, run_sums, subtrees, tree_sum
from quorate.coordination.workers import Workers

SHARDS = st.integers(1, 70)
HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9).map(Hosts)


def parts_of(shards: Sequence[int], of: int) -> list[tuple[Node, str]]:
    tree = TreeSum(of, add)
    for shard in shards:
        tree.put((0, shard), leaf(0, shard))
    return list(tree.parts.items())


# --- the tree of shards ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "expected"), [(1, "0.0"), (7, "(((0.0+0.1)+(0.2+0.3))+((0.4+0.5)+0.6))")]
)
def test_the_order_of_the_sum_is_this(shards: int, expected: str) -> None:
    parts = [((0, shard), leaf(0, shard)) for shard in range(shards)]
    assert tree_sum(parts, shards, add) == whole_sum(0, shards) == expected


@given(st.integers(1, 40), st.integers(0, 1000))
@fixed()
def test_whoever_holds_what_the_order_of_additions_is_one(shards: int, seed: int) -> None:
    """Leaves arrive in any order; there is no root before the last leaf."""
    order = random.Random(seed)
    trees = [TreeSum(shards, add) for _ in range(3)]
    alone = TreeSum(shards, add)
    for shard in order.sample(range(shards), shards):
        assert alone.root is None
        for tree in (alone, order.choice(trees)):
            tree.put((0, shard), leaf(0, shard))
    parts = [part for tree in trees for part in tree.parts.items()]
    order.shuffle(parts)
    assert tree_sum(parts, shards, add) == alone.root == whole_sum(0, shards)
    for missing in range(len(parts)):
        with pytest.raises(ValueError, match=rf"cover \d+ of {shards} leaves"):
            tree_sum(parts[:missing] + parts[missing + 1 :], shards, add)


# --- sums that a run of a worker adds in place ----------------------------------------------------


@given(SHARDS, st.integers(0, 69), st.integers(1, 70))
@fixed(80)
def test_each_sum_of_a_run_is_that_of_the_tree(shards: int, first: int, count: int) -> None:
    run = range(min(first, shards - 1), min(shards, first + count))
    run = run or range(shards - 1, shards)
    free = [*range(len(run))]
    plan = run_sums(run, shards, free)
    held: dict[int, str] = {}
    for shard, (place, additions) in zip(run, plan.puts, strict=True):
        assert place not in held, "it is still wanted"
        held[place] = leaf(0, shard)
        for left, right in additions:
            held[left] = add(held[left], held.pop(right))
    assert [*plan.sums] == sorted(plan.sums, key=lambda node: leaves(node, shards).start)
    assert sorted(plan.sums) == merged(((0, shard) for shard in run), shards)
    assert {node: held[place] for node, place in plan.sums.items()} == dict(parts_of(run, shards))
    assert sorted([*free, *plan.sums.values()]) == [*range(len(run))]


# --- sums that a host adds up before sending ------------------------------------------------------


@given(SHARDS, st.lists(st.integers(0, 5), min_size=70, max_size=70))
@fixed()
def test_sums_made_on_hosts_are_those_made_in_one_place_and_never_more_than_shards(
    shards: int, hosts: list[int]
) -> None:
    held = dict(enumerate(hosts[:shards]))
    nodes = []
    for host in {*held.values()}:
        among = {shard for shard in held if held[shard] == host}
        for node in merged(((0, shard) for shard in among), shards):
            own = leaves(node, shards)
            assert {together(shard, among, shards) for shard in own} == {own}
            # As an agent adds: shard by shard, in a separate tree without all other shards.
            parts = [((0, shard), leaf(0, shard)) for shard in own]
            nodes.append((node, tree_sum(parts, shards, add, present=len(own))))
    assert len({*held.values()}) <= len(nodes) == vectors(held, shards) <= shards
    assert tree_sum(nodes, shards, add) == whole_sum(0, shards)
    assert vectors(dict.fromkeys(held, "one host"), shards) == 1
    assert vectors({shard: shard for shard in held}, shards) == shards


@pytest.mark.parametrize(
    ("hosts", "per_host", "expected"), [(8, 8, 8), (8, 6, 16), (8, 1, 8), (1250, 8, 1250)]
)
def test_a_host_with_a_power_of_two_sends_one_vector(
    hosts: int, per_host: int, expected: int
) -> None:
    """Shards are dealt by the workers' ranks, one each: neighbours by rank, not by number."""
    members, workers = Workers(), hosts * per_host
    for worker in range(workers):
        members.join(worker, f"host-{worker % hosts}")
    held = {
        shard: members.by_number[worker].place
        for worker in range(workers)
        for shard in home_shards(members.rank_of(worker), workers)
    }
    assert vectors(held, workers) == expected


# --- slices of the ranks of a collective ----------------------------------------------------------


@given(shards=SHARDS, ranks=st.integers(1, 40))
@fixed()
def test_each_rank_hands_over_one_sum_and_all_of_them_make_the_tree(
    shards: int, ranks: int
) -> None:
    nodes = subtrees(shards, ranks)
    assert len(nodes) == min(shards, ranks)
    owned = [leaves(node, shards) for node in nodes]
    assert [shard for run in owned for shard in run] == list(range(shards))
    parts = [part for run in owned for part in parts_of(run, shards)]
    assert len(parts) == len(nodes)
    assert tree_sum(parts, shards, add) == whole_sum(0, shards)


@given(size=st.integers(0, 40 * BLOCK), ranks=st.integers(1, 9), blocks=st.integers(0, 20))
@fixed()
def test_slices_cover_a_vector_and_are_whole_blocks(size: int, ranks: int, blocks: int) -> None:
    cut = [slices(bucket, ranks, turn) for turn, bucket in enumerate(buckets(size, blocks))]
    pieces = sorted((piece for of in cut for piece in of if len(piece)), key=lambda p: p.start)
    assert [piece.start for piece in pieces] == [0, *(p.stop for p in pieces)][: len(pieces)]
    assert sum(map(len, pieces)) == size
    assert all(piece.start % BLOCK == 0 for piece in pieces)
    for of in cut:
        owned = [-(-len(piece) // BLOCK) for piece in of]
        assert max(owned) - min(owned) <= 1
        assert sum(owned) <= max(1, blocks)


@given(size=st.integers(1, 4000 * BLOCK), ranks=st.integers(1, 70), most=st.integers(1, 64))
@fixed(60)
def test_buckets_between_hosts_have_something_for_each_rank(
    size: int, ranks: int, most: int
) -> None:
    blocks = blocks_of_bucket(size, ranks, most)
    assert min(most, ranks) <= blocks <= most
    assert max(len(part) for part in slices(buckets(size, blocks)[0], ranks)) <= 4 * BLOCK  # 1 MB
    assert blocks <= ranks or len(buckets(size, blocks)) >= 8


@given(hosts=HOSTS, shards=st.integers(1, 40))
@fixed()
def test_each_shard_is_one_rank_s_and_a_host_hands_over_each_of_its_own_once(
    hosts: Hosts, shards: int
) -> None:
    dealt = hosts.deal(shards)
    owned = [shard for node in dealt if node is not None for shard in leaves(node, shards)]
    assert sorted(owned) == list(range(shards))
    flat = subtrees(shards, len(dealt))
    assert most(dealt, shards) <= max(len(leaves(node, shards)) for node in flat)
    for host, ranks in enumerate(hosts.ranks):
        own = [s for r in ranks if (n := dealt[r]) is not None for s in leaves(n, shards)]
        summed = [s for node in hosts.sums(dealt, host, shards) for s in leaves(node, shards)]
        assert sorted(summed) == sorted(own)
        assert len(hosts.sums(dealt, host, shards)) <= len(ranks)
        # Each rank receives from a single rank of each host.
        hands = [hosts.hand(host, rank) for rank in range(len(hosts.of))]
        assert set(hands) <= set(ranks)
        assert all(hands[rank] == rank for rank in ranks)
        for other, theirs in enumerate(hosts.ranks):
            if other != host:
                spread = [[hands[r] for r in theirs].count(rank) for rank in ranks]
                assert max(spread) - min(spread) <= 1


def test_nobody_waits_for_the_host_of_one_rank() -> None:
    """With half of the 8 shards, the lonely rank would be the last to finish."""
    dealt = Hosts("a" + "b" * 7).deal(8)
    assert (most(dealt, 8), slowest_factor(dealt, 8)) == (1, 1)
