"""Forks of a rank's user code have signals of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKS = """
import multiprocessing, os, signal, time
from quorate.training.collective.asked import Asked
asked = []
rank = Asked(asked.append)
fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
fork.start()
time.sleep(0.3)
fork.terminate()  # as Pool does with its workers
fork.join(20)
assert fork.exitcode == -signal.SIGTERM, fork.exitcode
time.sleep(0.3)
assert asked == [] and rank.by is None, asked
os.kill(os.getpid(), signal.SIGTERM)
while not asked:
    time.sleep(0.01)
print(asked)
"""


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no forks on this system")
def test_sigterm_to_a_fork_ends_the_fork_and_not_the_run() -> None:
    words = [sys.executable, "-c", FORKS]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "['SIGTERM']\n"), ended.stderr
