"""Tests in a process of their own: of the simulated accelerator by itself, and of mended faults.

A process has the devices for good, and other tests must not. ``on_device/`` shows the accelerator,
which also runs the tests that want a GPU. With each patch of ``faults/``, on a copy of the source,
the test that it names fails. The head of a patch says what the fault is, which test reports it (a
path from here), and in which words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.accelerator import build, environment

import quorate

HERE = Path(__file__).parent
FILES = [*sorted(HERE.glob("on_device/*.py")), HERE.parent / "end_to_end" / "test_gpu.py"]
LIMIT_S = 300
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.lacking() is not None, reason=build.lacking() or ""),
]


def run_alone(test: str | Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a test to its end. Blocks."""
    build.library()
    words = [sys.executable, "-m", "pytest", "-x", str(test), "-p", "no:cacheprovider"]
    return subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_device(file: Path) -> None:
    ended = run_alone(file, environment((0.5, 300, 0)))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("patch", sorted(HERE.glob("faults/*.patch")), ids=lambda path: path.stem)
def test_a_fault_is_reported(patch: Path, tmp_path: Path) -> None:
    lines = patch.read_text().partition("diff --git")[0].splitlines()
    head = dict(line.split(": ", 1) for line in lines if line.startswith(("test: ", "says: ")))
    shutil.copytree(Path(quorate.__file__).parent, tmp_path / "src/quorate")
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    ended = run_alone(HERE / head["test"], {**os.environ, "PYTHONPATH": str(tmp_path / "src")})
    assert ended.returncode == 1, ended.stdout
    assert head["says"] in ended.stdout, ended.stdout
