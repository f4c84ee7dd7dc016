"""Hosts: shards dealt to ranks so that little leaves a host, and nobody waits for that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.coordination.hosts import Hosts, most, slowest_factor
from quorate.coordination.ownership import leaves, subtrees

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9).map(Hosts)


@given(hosts=HOSTS, shards=st.integers(1, 40))
def test_each_shard_is_one_rank_s(hosts: Hosts, shards: int) -> None:
    dealt = hosts.deal(shards)
    owned = [shard for node in dealt if node is not None for shard in leaves(node, shards)]
    assert sorted(owned) == list(range(shards))
    flat = subtrees(shards, len(dealt))
    assert most(dealt, shards) <= max(len(leaves(node, shards)) for node in flat)


@given(hosts=HOSTS, shards=st.integers(1, 40))
def test_what_hosts_hand_over_covers_each_shard_once(hosts: Hosts, shards: int) -> None:
    dealt = hosts.deal(shards)
    for host, ranks in enumerate(hosts.ranks):
        own = [s for r in ranks if (n := dealt[r]) is not None for s in leaves(n, shards)]
        summed = [s for node in hosts.sums(dealt, host, shards) for s in leaves(node, shards)]
        assert sorted(summed) == sorted(own)
        assert len(hosts.sums(dealt, host, shards)) <= len(ranks)


@pytest.mark.parametrize(
    ("names", "shards"), [("aabb", 8), ("aabbcc", 8), ("aab", 8), ("abab", 4), ("aaaabbbb", 64)]
)
def test_one_sum_leaves_a_host(names: str, shards: int) -> None:
    hosts = Hosts(names)
    dealt = hosts.deal(shards)
    assert all(len(hosts.sums(dealt, h, shards)) == 1 for h in range(len(hosts.ranks)))


def test_nobody_waits_for_the_host_of_one_rank() -> None:
    """A half of 8 shards for the rank that is alone would make it the last one."""
    hosts = Hosts("a" + "b" * 7)
    dealt = hosts.deal(8)
    assert most(dealt, 8) == 1
    assert slowest_factor(dealt, 8) == 1


@given(hosts=HOSTS)
def test_each_rank_is_dealt_with_by_one_of_each_host(hosts: Hosts) -> None:
    for host, ranks in enumerate(hosts.ranks):
        hands = [hosts.hand(host, rank) for rank in range(len(hosts.of))]
        assert set(hands) <= set(ranks)
        assert all(hands[rank] == rank for rank in ranks)
        for other, theirs in enumerate(hosts.ranks):
            if other != host:
                spread = [[hands[r] for r in theirs].count(rank) for rank in ranks]
                assert max(spread) - min(spread) <= 1
