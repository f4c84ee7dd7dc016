"""The main job as a user runs it, on IDX files of the user's own; and the tree in the README."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from open_data.fashion_mnist import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from support.warm import WARM

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fashion_mnist.py"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Images that are bright where their label says: easy to tell apart."""
    folder = tmp_path / "data"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for images_name, labels_name, rows in (
        (TRAIN_IMAGES, TRAIN_LABELS, 600),
        (TEST_IMAGES, TEST_LABELS, 150),
    ):
        labels = generator.integers(0, 10, rows, dtype=np.uint8)
        images = generator.integers(0, 60, (rows, 28, 28), dtype=np.uint8)
        for row, label in enumerate(labels):
            images[row, 2 * label + 4 : 2 * label + 7] += 180
        header = struct.pack(">HBBIII", 0, 8, 3, rows, 28, 28)
        (folder / images_name).write_bytes(header + images.tobytes())
        (folder / labels_name).write_bytes(struct.pack(">HBBI", 0, 8, 1, rows) + labels.tobytes())
    return folder


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
