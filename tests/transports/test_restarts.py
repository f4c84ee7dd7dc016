"""Whether and when a worker that ended is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.transports.processes.restarts import Restarts

# None: it computes a shard; True: it is killed; False: it ends by itself.
EVENTS = st.lists(st.sampled_from([None, True, False]), max_size=60)


@given(EVENTS, st.integers(1, 8), st.integers(1, 4))
def test_the_budget_is_of_starts_in_vain(
    events: list[bool | None], killed: int, failed: int
) -> None:
    restarts = Restarts(killed=killed, failed=failed)
    in_vain: list[bool] = []  # since it last computed
    for killed_now in events:
        if killed_now is None:
            restarts.computed()
            in_vain = []
            continue
        delay_s = restarts.ended(killed=killed_now)
        given_up = len(in_vain) + 1 > killed or [*in_vain, killed_now].count(False) >= failed
        assert (delay_s is None) == given_up
        if delay_s is not None:
            assert 0 <= delay_s <= restarts.longest_s
            assert (delay_s == 0) == (not in_vain)  # one that was at work is missed at once
        in_vain.append(killed_now)
        if given_up:
            return
    assert restarts.computed_in_all == events.count(None)


def test_one_that_computes_is_started_for_ever() -> None:
    restarts = Restarts()
    for _ in range(1000):
        assert restarts.ended(killed=False) == 0.0
        restarts.computed()


@pytest.mark.parametrize(("killed", "starts"), [(True, 20), (False, 2)])
def test_delays_double_up_to_a_bound(killed: bool, starts: int) -> None:
    restarts = Restarts()
    delays_s = [restarts.ended(killed=killed) for _ in range(starts)]
    expected = [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 13]
    assert delays_s == pytest.approx(expected[:starts])
    assert restarts.ended(killed=killed) is None
