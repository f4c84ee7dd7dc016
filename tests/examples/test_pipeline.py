"""examples/pipeline in control groups: killed in one piece, trained to the same bits in two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.example_modules import EXAMPLES
from support.memory_group import memory_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/sys/fs/cgroup").exists(), reason="control groups are Linux's"),
]

EXAMPLE = EXAMPLES / "pipeline"
MIB = 900
STEPS = ("--steps", "2")


def ran(*words: str) -> str:
    command = [sys.executable, *words]
    ended = subprocess.run(
        command, cwd=EXAMPLE, capture_output=True, text=True, timeout=600, check=False
    )
    return ended.stdout + ended.stderr


def test_what_does_not_fit_one_worker_trains_on_two() -> None:
    with memory_group(MIB << 20):
        pass  # else it is skipped
    limited = ("limited.py", "--mib", str(MIB), "train.py", *STEPS)
    alone = ran(*limited, "--devices", "cpu")
    assert "the main process was ended by signal 9" in alone, alone
    split = ran(*limited, "--devices", "cpu+cpu", "--split", "decoder")
    assert "ended by signal" not in split, split
    for name, most in re.findall(r"^(.+): at most (\d+) of", split, re.MULTILINE):
        assert 0 < int(most) < MIB, name
    whole = ran("train.py", *STEPS, "--devices", "cpu")
    (digest,) = re.findall(r"parameters (\w{16})$", whole, re.MULTILINE)
    assert f"parameters {digest}" in split, split
