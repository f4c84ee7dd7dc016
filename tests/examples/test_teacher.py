"""The mean teacher as a user runs it: it learns from few labels, and has the same bits anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bright_images import bright_images
from support.runs import command, digests, run_all

EXAMPLE = Path(__file__).parents[2] / "examples" / "teacher.py"


@pytest.mark.slow
def test_the_teacher_learns_with_the_same_bits_on_two_workers(tmp_path: Path) -> None:
    data = bright_images(tmp_path / "data", 1200, 200)
    common = ("--data", str(data), "--epochs", "3", "--target", "0.5")
    ended = run_all(
        {
            name: command(EXAMPLE, *common, "--run-dir", str(tmp_path / name), options=options)
            for name, options in {
                "one": ("--engine", "towers", "--workers", "1"),
                "two": ("--engine", "processes", "--workers", "2"),
            }.items()
        }
    )
    for name, end in ended.items():
        assert end.code == 0, end.said
        assert "test accuracy: student " in end.out, name
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert ended["one"].out.splitlines()[-1] == ended["two"].out.splitlines()[-1]
