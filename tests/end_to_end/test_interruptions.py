"""A run that is interrupted and resumed has the bits of one that was not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.references import References
from support.runs import (
    SCRIPTS,
    command,
    digests,
    inspected,
    killed_after_a_save,
    run,
    run_all,
)

from quorate.commands.main import main

# 37 and 100 are both in the middle of an epoch of 14 updates.


def hundred(run_dir: Path, steps: int, optimizer: str, workers: int, engine: str) -> list[str]:
    options = ("--engine", engine, "--workers", str(workers), "--run-dir", str(run_dir))
    return command("hundred.py", str(steps), optimizer, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_hundred_updates_are_37_and_63_elsewhere(
    optimizer: str,
    tmp_path: Path,
    references: References,
) -> None:
    def on_towers(name: str, steps: int, workers: int) -> None:
        assert main(hundred(tmp_path / name, steps, optimizer, workers, "towers")[3:]) == 0

    whole = references.on_a_tower("hundred.py", "100", optimizer).digests
    assert whole[1] is not None  # of the averaged weights
    # From 3 towers to 2; to as many processes and from those to fewer.
    on_towers("towers", 37, 3)
    on_towers("towers", 100, 2)
    assert digests(tmp_path / "towers") == whole
    if optimizer == "momentum":
        return
    on_towers("mixed", 37, 3)
    words = {
        "mixed": hundred(tmp_path / "mixed", 100, optimizer, 2, "processes"),
        "processes": hundred(tmp_path / "processes", 37, optimizer, 2, "processes"),
    }
    ended = run_all(words)
    ended |= run_all({"fewer": hundred(tmp_path / "processes", 100, optimizer, 1, "processes")})
    for name, one in ended.items():
        assert one.code == 0, one.said
        said = "resumed step 37 (epoch 3, 64%) from"
        assert (said in one.out) == (name != "processes"), one.said
    for name in ("mixed", "processes"):
        assert digests(tmp_path / name) == whole, name


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
def test_a_run_that_is_killed_goes_on_elsewhere_with_the_same_bits(
    tmp_path: Path, references: References
) -> None:
    """On three processes, of which the coordinator is killed; then on two."""
    script, run_dir = ("hundred.py", "40", "momentum"), tmp_path / "run"
    options = ("--engine", "processes", "--run-dir", str(run_dir), "--save-every-steps", "5")
    words = command(*script, options=(*options, "--workers", "3"))
    step = killed_after_a_save(tmp_path, words, run_dir)
    assert 5 <= step < 40
    ended = run(command(*script, options=(*options, "--workers", "2")))
    assert ended.code == 0, ended.said
    assert f"resumed step {step} " in ended.out
    assert inspected(run_dir)["digest"] == references.on_a_tower(*script).facts["digest"]


def interrupted(tmp_path: Path, signal_number: int, times: int) -> list[dict[str, Any]]:
    script = str(SCRIPTS / "interrupted.py")
    words = [sys.executable, script, str(tmp_path / "run"), str(signal_number), str(times), "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["digest"] == found["undisturbed"]
    interruptions: list[dict[str, Any]] = found["interruptions"]
    assert len(interruptions) == times
    assert any(each["was_saving"] for each in interruptions)
    return interruptions


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    for each in interrupted(tmp_path, 9, 8):
        assert each["code"] in (-9, 0)
        assert each["made"] - each["saved"] <= 7  # a save every 7 updates


@pytest.mark.slow
def test_told_to_stop_at_any_moment_it_loses_nothing(tmp_path: Path) -> None:
    for each in interrupted(tmp_path, 15, 6):
        assert each["code"] in (143, -15, 0)  # in a save at the end, or before torch is set up
        assert each["made"] == each["saved"]
        assert each["lived_s"] < 60.0  # 3 s and a step; the rest is for a machine that is busy
