"""The simulated accelerator by itself, shown by ``on_device/``; and the tests that want a GPU.

A process has the devices for good, and other tests must not, so that these run in one of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.accelerator import build, environment

HERE = Path(__file__).parent
FILES = [*sorted(HERE.glob("on_device/*.py")), HERE.parent / "end_to_end" / "test_gpu.py"]
LIMIT_S = 300
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.lacking() is not None, reason=build.lacking() or ""),
]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_device(file: Path) -> None:
    build.library()
    words = [sys.executable, "-m", "pytest", str(file), "-p", "no:cacheprovider"]
    ended = subprocess.run(
        words,
        env=environment((0.5, 300, 0)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
