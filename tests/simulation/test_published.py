"""Published figures that the simulation has to come near, and those that it is known not to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import published


def test_time_to_failure_at_meta() -> None:
    """1.8 h at 2,048 nodes is the rate itself; 7.9 h at 128 nodes is not, by a factor of 3.6."""
    assert published.of_nodes(128).run_mtbf_h == pytest.approx(28.8, rel=0.01)
    large_h = published.NODE_MTBF_H / 2048
    assert large_h == pytest.approx(1.80, rel=0.01)


def test_backup_workers_of_tensorflow() -> None:
    """Of shards that are held up now and then 3 spares have the best return; a fifth gives less
    than it costs. That a fifth makes steps slower is not predicted: nothing here is shared.
    """
    step_s, returns = published.backup_workers(0.025, 1.3, 0.05, steps=150)
    assert step_s[4] == 1.93
    assert max(range(6), key=lambda spares: returns[spares]) in (2, 3, 4)
    assert returns[3] == pytest.approx(0.095, abs=0.02)
    assert returns[5] < returns[4]
    assert step_s == sorted(step_s, reverse=True)
