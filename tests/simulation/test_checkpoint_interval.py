"""How often to save: closed forms against runs that are played, and rules of thumb against both."""

from __future__ import annotations

from math import inf

import pytest
from support.played_goodput import played_goodput

from quorate.simulation.checkpoint_interval import (
    best_s,
    daly_s,
    goodput,
    young_s,
)

MTBF_H = [0.5, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]
STALL_S, RESTART_S = 10.0, 60.0


def test_played_by_hand() -> None:
    # One failure, after very many intervals.
    assert played_goodput(10.0, 0.0, 1e9, 0.0, failures=1) == pytest.approx(1.0, abs=1e-6)
    assert played_goodput(10.0, 10.0, 1e9, 0.0, failures=1) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("mtbf_h", MTBF_H)
def test_the_closed_form_is_what_runs_that_are_played_have(mtbf_h: float) -> None:
    mtbf_s = mtbf_h * 3600
    every_s = best_s(STALL_S, mtbf_s)
    for times in (0.3, 1.0, 3.0):
        played = played_goodput(times * every_s, STALL_S, mtbf_s, RESTART_S, failures=20_000)
        formula = goodput(times * every_s, STALL_S, mtbf_s, RESTART_S)
        assert 1 - played == pytest.approx(1 - formula, rel=0.03)


@pytest.mark.parametrize("mtbf_h", MTBF_H)
def test_young_and_daly_are_within_5_percent_of_the_optimum_that_is_played(mtbf_h: float) -> None:
    """In intervals, on a grid of steps of 1%: of 10 s a checkpoint. Daly's within the grid's."""
    mtbf_s = mtbf_h * 3600
    optimum_s = best_s(STALL_S, mtbf_s)
    grid = [optimum_s * 1.01**n for n in range(-40, 41)]
    of_grid = {every_s: goodput(every_s, STALL_S, mtbf_s, RESTART_S) for every_s in grid}
    assert max(of_grid, key=lambda every_s: of_grid[every_s]) == optimum_s  # the middle one
    assert daly_s(STALL_S, mtbf_s) == pytest.approx(optimum_s, rel=0.001)
    assert young_s(STALL_S, mtbf_s) == pytest.approx(optimum_s, rel=0.05)
    # Played, the optimum is so flat that its place is noise; what it costs is not.
    best = max(
        played_goodput(every_s, STALL_S, mtbf_s, RESTART_S, failures=2_000)
        for every_s in grid[::10]
    )
    for rule_s in (young_s(STALL_S, mtbf_s), daly_s(STALL_S, mtbf_s)):
        played = played_goodput(rule_s, STALL_S, mtbf_s, RESTART_S, failures=2_000)
        assert 1 - played == pytest.approx(1 - best, rel=0.05)


def test_where_young_is_not() -> None:
    """A checkpoint of a minute and a failure each half hour: 9% too long; Daly's is not."""
    optimum_s = best_s(60.0, 1800.0)
    assert young_s(60.0, 1800.0) / optimum_s == pytest.approx(1.09, abs=0.01)
    assert daly_s(60.0, 1800.0) == pytest.approx(optimum_s, rel=0.003)


def test_the_ends() -> None:
    assert best_s(10.0, inf) == daly_s(10.0, inf) == inf
    assert goodput(inf, 10.0, inf, 60.0) == 1.0
    assert goodput(90.0, 10.0, inf, 60.0) == 0.9
    assert best_s(0.0, 3600.0) == pytest.approx(0.0, abs=1e-6)
    assert goodput(0.0, 0.0, 3600.0, 0.0) == 1.0
    assert goodput(1e9, 10.0, 3600.0, 0.0) == 0.0
    assert daly_s(100.0, 50.0) == 50.0
