"""What processes of one host know of each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quorate.machine import this_host


def soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_a_process_that_is_stopped_and_one_that_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not this_host.has_ended(child.pid)
        assert not this_host.is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        assert soon(lambda: this_host.is_stopped(child.pid))
        assert not this_host.has_ended(child.pid)
        child.kill()
        assert soon(lambda: this_host.has_ended(child.pid))  # though nobody has waited for it
        child.wait()
        assert this_host.has_ended(child.pid)
        assert not this_host.is_stopped(child.pid)


def test_a_host_has_one_mark_for_all_of_its_processes() -> None:
    code = "from quorate.machine import this_host; print(this_host.mark())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == this_host.mark()
    assert this_host.name() in this_host.mark()
