"""Signal handlers of quorate's: forks get what was there before, however early a signal comes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from quorate.machine import signal_handlers

FORK = multiprocessing.get_context("fork")


def of_user(_number: int, _frame: object) -> None:
    os._exit(3)


def of_quorate(_number: int, _frame: object) -> None:
    """Note a signal, and go on."""


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, of_user)
    yield
    signal_handlers.put_back([of_quorate])
    signal.signal(signal.SIGTERM, before)


def test_a_fork_has_the_former_handler_and_the_parent_goes_on() -> None:
    signal_handlers.handle(signal.SIGTERM, of_quorate)
    for _ in range(50):
        process = FORK.Process(target=time.sleep, args=(600,), daemon=True)
        process.start()
        process.terminate()  # most often before the fork has run a line
        process.join(20)
        assert process.exitcode == 3
    assert signal.getsignal(signal.SIGTERM) is of_quorate
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal_handlers.put_back([of_quorate])
    assert signal.getsignal(signal.SIGTERM) is of_user


def test_a_handler_that_user_code_installed_since_then_stays() -> None:
    signal_handlers.handle(signal.SIGTERM, of_quorate)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with FORK.Pool(1) as pool:
        assert pool.apply(signal.getsignal, (signal.SIGTERM,)) is signal.SIG_IGN
        pool.close()
        pool.join()
    signal_handlers.put_back([of_quorate])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_program_that_is_started_where_signals_are_ignored_hears_them() -> None:
    script = (
        "import os, signal, subprocess, sys\n"
        "from quorate.machine.signal_handlers import ignore_job_signals\n"
        "ignore_job_signals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "for how in ({}, {'preexec_fn': os.getpid}):\n"
        "    child = subprocess.Popen(['sleep', '600'], **how)\n"
        "    child.terminate()\n"
        "    print(child.wait(20))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.split() == ["-15", "-15"]
