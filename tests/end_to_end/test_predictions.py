"""Predictions by worker processes, ranks and a Ray cluster: the bits of a tower, nothing twice."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.runs import command, last_json, run_all

pytestmark = pytest.mark.slow

RUNS: dict[str, tuple[str, ...]] = {
    "tower": ("--engine", "towers", "--workers", "1"),
    "two": ("--engine", "processes", "--workers", "2"),
    "killed": ("--engine", "processes", "--workers", "2"),
    "ranks": ("--engine", "collective", "--workers", "2"),
}


def test_the_same_on_all_engines_and_with_a_kill(tmp_path: Path) -> None:
    ended = run_all(
        {
            name: command("predicted.py", str(tmp_path / name), name, options=options)
            for name, options in RUNS.items()
        }
    )
    found = {}
    for name, each in ended.items():
        assert each.code == 0, (name, each.said)
        found[name] = last_json(each.out)
    for name, each in found.items():
        for what in ("prints", "metrics", "after"):
            assert each[what] == found["tower"][what], (name, what)
    assert len(found["tower"]["prints"]) == 4
    assert found["two"]["processes"] == 2
    assert (tmp_path / "killed" / "killed").exists()
    assert "killed by signal 9" in ended["killed"].said


def test_a_prediction_may_be_the_first_loop_of_a_script(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    commands = {
        name: command("predicted.py", str(tmp_path / name), "first", options=RUNS[name])
        for name in ("tower", "two")
    }
    ended = run_all(commands)
    for name, each in ended.items():
        assert each.code == 0, (name, each.said)
    tower, two = (last_json(ended[name].out) for name in ("tower", "two"))
    assert two["prints"] == tower["prints"]
    assert not folder.exists()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_the_same_on_a_ray_cluster(tmp_path: Path) -> None:
    ray = ("--engine", "ray", "--workers", "2")
    ended = run_all(
        {
            "tower": command("predicted.py", str(tmp_path / "t"), options=RUNS["tower"]),
            "ray": command("predicted.py", str(tmp_path / "r"), options=ray),
        }
    )
    for name, each in ended.items():
        assert each.code == 0, (name, each.said)
    tower, there = (last_json(ended[name].out) for name in ("tower", "ray"))
    assert there["prints"] == tower["prints"]
    assert there["metrics"] == tower["metrics"]
