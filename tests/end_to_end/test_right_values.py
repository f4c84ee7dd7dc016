"""Experts without rows, counters, written batches: the same bits on processes and after resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import TOWER, command, run


@pytest.mark.slow
def test_one_digest_on_towers_on_processes_and_after_resumes(tmp_path: Path) -> None:
    def digest(folder: str, steps: int, *options: str) -> str:
        words = command("right_values.py", str(tmp_path / folder), str(steps), options=options)
        ended = run(words)
        assert ended.code == 0, ended.said
        return next(line for line in ended.out.splitlines() if line.startswith("digest "))

    expected = digest("tower", 24, *TOWER)
    assert digest("three", 24, "--engine", "processes", "--workers", "3") == expected
    for steps, workers in ((2, "2"), (7, "1"), (24, "2")):
        found = digest("resumed", steps, "--engine", "processes", "--workers", workers)
    assert found == expected
