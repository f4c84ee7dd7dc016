"""Whoever has loader processes is killed while these start: nobody and nothing is left.

QUORATE_TEST_KILLS says how many times (20).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.references import References
from support.runs import SCRIPTS, command, last_json, processes_of, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc"),
]

KILLS = int(os.environ.get("QUORATE_TEST_KILLS", "20"))
LIMIT_S = 120 + 3 * KILLS


def left_by(folder: Path, words: list[str]) -> tuple[str, set[str]]:
    """Run to the end; return what was said, and the files that are left."""
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    with started(folder, words) as (run_, mark):
        said, _ = run_.communicate(timeout=LIMIT_S)
        assert run_.returncode == 0, said
        assert not processes_of(mark)
        left = {path.name for path in (folder / "temporary").iterdir()}
    if before:
        left |= {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    return said, {name for name in left if not name.startswith("torchinductor_")}  # torch's own


def test_of_a_feed(tmp_path: Path) -> None:
    said, left = left_by(tmp_path, [sys.executable, str(SCRIPTS / "loaders.py"), str(KILLS), "1"])
    found = last_json(said)
    assert len(found["loaders"]) == KILLS
    assert min(found["loaders"]) < 3  # not all had been started
    assert not left


def test_of_workers(tmp_path: Path, references: References) -> None:
    kills = max(4, KILLS // 3)
    options = ("--workers", "2", "--loader-workers", "2")
    said, left = left_by(tmp_path, command("loaders.py", str(kills), "1", options=options))
    found = last_json(said)
    assert found["killed"] == kills
    assert found["digest"] == references.on_a_tower("loaders.py", "0", "0").json["digest"]
    assert not left
