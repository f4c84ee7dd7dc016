"""The main job as a user runs it, on IDX files of the user's own; and the tree in the README."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from open_data.fashion_mnist import TRAIN_IMAGES
from support.bright_images import bright_images
from support.warm import WARM

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fashion_mnist.py"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return bright_images(tmp_path / "data", 600, 150)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "quorate", "run", "--devices", "cpu"]
    return subprocess.run(
        [*command, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_it_learns_and_says_where_the_results_are(data: Path, tmp_path: Path) -> None:
    where = str(tmp_path / "run")
    common = ("--data", str(data), "--run-dir", where, "--batch-size", "50", "--epochs", "8")
    ended = run(*common, "--target", "0.5")  # chance is 0.1
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "50 rows = 4 shards x 12-13 on 1 cpu worker (1 thread each), sync"
    assert lines[-2].startswith("test accuracy ")
    assert lines[-1] == f"results: {where}  (quorate inspect {where})"
    again = ["run", "--devices", "cpu", str(EXAMPLE), *common, "--target", "1.01"]
    code, out, _ = WARM.run(again, os.environ, 120)
    assert code == 1
    assert "nothing to do: 96 of 96 updates are done" in out


@pytest.mark.slow
def test_damaged_files_are_one_line_and_exit_code_2(data: Path) -> None:
    images = data / TRAIN_IMAGES
    images.write_bytes(images.read_bytes()[:-100])
    ended = run("--data", str(data))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"{images} at byte 470,316" in ended.stderr
    assert "expected 470,400 bytes" in ended.stderr
