"""Processes of Ray that a run cannot do without are killed: one line says so, nothing is left.

``tests/scripts/ray_ends.py`` kills as many of each kind as it is asked to.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ray_ends import SAYS, End, on_a_local_cluster, on_own_node

pytest.importorskip("ray", reason="quorate's extra ray is not installed")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("run", "who"),
    [(on_a_local_cluster, "raylet"), (on_a_local_cluster, "gcs"), (on_own_node, "raylet")],
)
def test_a_run_ends_with_the_reason(
    tmp_path: Path, run: Callable[[Path, str, random.Random], End], who: str
) -> None:
    end = run(tmp_path, who, random.Random())
    assert end.code == 2, end.said
    assert re.match(SAYS, end.last), end.said
    assert end.is_saved, end.said
    assert "state-dump" not in end.said  # no page of Ray's logs
    assert not end.left
    assert end.seconds < 60.0, end.said  # 3 to 13, on a busy machine
