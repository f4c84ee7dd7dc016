"""examples/kill_it.py: the weights after a lost worker, a lost run, and no loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "kill_it.py"


@pytest.mark.slow
def test_three_trainings_have_one_digest() -> None:
    command = [sys.executable, str(EXAMPLE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *_, worker_killed, run_killed, undisturbed, verdict = ended.stdout.splitlines()
    assert verdict == "the same bits, three times"
    assert "killed by signal 9" in ended.stdout
    assert "resumed step" in ended.stdout
    digests = {line.split()[-1] for line in (worker_killed, run_killed, undisturbed)}
    assert len(digests) == 1
