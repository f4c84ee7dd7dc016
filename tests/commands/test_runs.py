"""``quorate runs``: what became of runs, torn ones too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.runs import command, started, wait_for

from quorate.commands.main import main
from quorate.commands.runs import age

SAVED = Path(__file__).parents[1] / "services" / "data" / "before-rooms"


def listed(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["runs", str(folder), "--json", *words]) == 0
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return runs


def by_name(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {run["path"]: run for run in runs}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Run directories of many kinds, and folders that are none."""
    shutil.copytree(SAVED, tmp_path / "stopped")
    shutil.copytree(SAVED, tmp_path / "deep" / "er" / "killed")
    with (tmp_path / "deep" / "er" / "killed" / "metrics.jsonl").open("a") as log:
        log.write('{"global_step": 12, "loss": 0.25}\n{"global_step": 13, "lo')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.lock").touch()
    torn = tmp_path / "torn" / "checkpoints" / "step-000000000007"
    torn.mkdir(parents=True)
    (torn / "state.json").write_text('{"format": 2, "glo')
    (tmp_path / "data" / "images").mkdir(parents=True)  # no run
    (tmp_path / "stopped" / "aside-1").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    return tmp_path


def test_what_became_of_runs_of_before_there_was_a_status(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = by_name(listed(folder, capsys))
    assert {name: run["state"] for name, run in runs.items()} == {
        "stopped": "stopped",
        "deep/er/killed": "killed",
        "empty": "empty",
        "torn": "damaged",
    }
    killed = runs["deep/er/killed"]
    assert (killed["global_step"], killed["saved_step"], killed["loss"]) == (12, 10, 0.25)
    assert killed["why"] == "step 10 is saved, 2 updates to do again"
    assert "step-000000000007/state.json: got no JSON" in runs["torn"]["why"]
    assert runs["empty"]["global_step"] is None


def test_the_table_and_its_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder), "--sort", "step"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == [
        "run",
        "state",
        "step",
        "loss",
        "age",
        "why",
    ]  # no run has a best checkpoint
    assert [line.split()[0] for line in shown[1:]] == ["deep/er/killed", "stopped", "empty", "torn"]
    assert [run["path"] for run in listed(folder, capsys, "--sort", "name")] == sorted(
        run["path"] for run in listed(folder, capsys)
    )
    ages = [run["age_s"] for run in listed(folder, capsys) if run["age_s"] is not None]
    assert ages == sorted(ages)
    assert main(["runs", str(folder / "stopped")]) == 0  # a run directory itself
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [".", "stopped"]


@pytest.mark.parametrize(
    ("loss", "shown"), [("1e308", "1.0000e+308"), ("NaN", "nan"), ('"NaN"', "nan"), ('"x"', "")]
)
def test_losses_that_are_huge_or_not_finite(
    loss: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"global_step": 7, "loss": {loss}}}\n')
    assert main(["runs", str(tmp_path)]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells[:3] == [".", "killed", "7"]
    assert (cells[3] if shown else "") == shown


def test_where_there_is_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder / "data")]) == 0
    assert capsys.readouterr().out == f"no run directory in {folder / 'data'} or below it\n"
    assert listed(folder / "data", capsys) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every folder")
def test_a_folder_that_is_closed_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "data").chmod(0)
    try:
        assert main(["runs", str(folder)]) == 0
    finally:
        (folder / "data").chmod(0o755)
    assert f"not looked into: {folder / 'data'}: Permission denied" in capsys.readouterr().err


def test_runs_are_listed_without_torch(folder: Path) -> None:
    check = (
        "import sys; from quorate.commands.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'rich'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else code)"
    )
    words = [sys.executable, "-c", check, "runs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (-3, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (172800, "2 d")],
)
def test_an_age_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.slow
def test_a_run_that_goes_on_and_is_killed_and_one_that_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("a", signal.SIGKILL), ("b", signal.SIGTERM)):
        run_dir = str(tmp_path / name)
        words = command(
            "lasting.py", "5000", "0.02", options=("--workers", "1", "--run-dir", run_dir)
        )
        with started(tmp_path, words) as (process, _):
            wait_for(process, "step ")
            assert by_name(listed(tmp_path, capsys))[name]["state"] == "running"
            process.send_signal(number)
            process.wait(60)
    runs = by_name(listed(tmp_path, capsys))
    assert runs["a"]["state"] == "killed"
    assert (runs["b"]["state"], runs["b"]["why"]) == ("stopped", "SIGTERM")
    assert runs["b"]["saved_step"] == runs["b"]["global_step"] > 0
