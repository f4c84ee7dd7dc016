"""Faults of code for GPUs: with each patch of ``faults/``, the test that it names fails.

The head of a patch says what the fault is, which test reports it (a path from here), and in which
words. The test runs on a copy of the source with the patch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.accelerator import build

import quorate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.lacking() is not None, reason=build.lacking() or ""),
]
HERE = Path(__file__).parent
LIMIT_S = 300


@pytest.mark.parametrize("patch", sorted(HERE.glob("faults/*.patch")), ids=lambda path: path.stem)
def test_a_fault_is_reported(patch: Path, tmp_path: Path) -> None:
    build.library()
    lines = patch.read_text().partition("diff --git")[0].splitlines()
    head = dict(line.split(": ", 1) for line in lines if line.startswith(("test: ", "says: ")))
    shutil.copytree(Path(quorate.__file__).parent, tmp_path / "src/quorate")
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / head["test"])],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout
    assert head["says"] in ended.stdout, ended.stdout
