"""Processes of this host: their signals, streams and folders, and their knowledge of each other."""

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.messages import expect_error
from support.runs import soon

from quorate.errors import UserError
from quorate.machine import signal_handlers, this_host
from quorate.machine.forked_child import ForkedChild, end_children
from quorate.machine.surroundings import require_current_folder, require_temporary_folder

FORK = multiprocessing.get_context("fork")


def said_by(code: str, streams: str = "") -> subprocess.CompletedProcess[str]:
    """Return the end of a process of Python code, with some streams closed by a shell."""
    words = [
        "sh",
        "-c",
        f'unset PYTHONUNBUFFERED; exec "$@" {streams}',
        "sh",
        sys.executable,
        "-c",
        code,
    ]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


# --- signals --------------------------------------------------------------------------------------


def of_user(_number: int, _frame: object) -> None:
    os._exit(3)


def of_quorate(_number: int, _frame: object) -> None:
    """Note a signal, and go on."""


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, of_user)
    yield
    signal_handlers.put_back([of_quorate])
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handled")
def test_a_fork_has_the_former_handler_and_the_parent_goes_on() -> None:
    signal_handlers.handle(signal.SIGTERM, of_quorate)
    for _ in range(15):
        process = FORK.Process(target=time.sleep, args=(600,), daemon=True)
        process.start()
        process.terminate()  # most often before the fork has run a line
        process.join(20)
        assert process.exitcode == 3
    assert signal.getsignal(signal.SIGTERM) is of_quorate
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal_handlers.put_back([of_quorate])
    assert signal.getsignal(signal.SIGTERM) is of_user


def test_a_call_in_forks_is_made_by_a_fork_and_not_by_its_own_forks() -> None:
    read, write = os.pipe()
    leave_off = signal_handlers.in_forks(lambda: os.write(write, b"x"))
    for is_called in (True, False):
        if (pid := os.fork()) == 0:
            if (inner := os.fork()) != 0:
                os.waitpid(inner, 0)
            os._exit(0)
        os.waitpid(pid, 0)
        if is_called:
            leave_off()
    os.close(write)
    assert os.read(read, 9) == b"x"
    os.close(read)


def test_a_child_is_waited_for_as_long_as_is_said() -> None:
    quick, slow = (ForkedChild("test", time.sleep, s, closes=[], threads=1) for s in (0.2, 600))
    assert (quick.wait(60), slow.wait(0.1)) == (0, None)
    end_children([quick, slow])


@pytest.mark.usefixtures("handled")
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
    ended = said_by(
        "import os, signal, subprocess\n"
        "from quorate.machine.signal_handlers import ignore_job_signals\n"
        "ignore_job_signals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "for how in ({}, {'preexec_fn': os.getpid}):\n"
        "    child = subprocess.Popen(['sleep', '600'], **how)\n"
        "    child.terminate()\n"
        "    print(child.wait(20))\n"
    )
    assert ended.stdout.split() == ["-15", "-15"]


# --- folders and streams --------------------------------------------------------------------------


def test_a_current_folder_that_was_deleted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        with expect_error(UserError, name="the current folder", got="a deleted folder"):
            require_current_folder()
    finally:
        os.chdir(tmp_path)
    require_current_folder()


def test_no_place_for_temporary_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with expect_error(UserError, name="the temporary folder"):
        require_temporary_folder()


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_descriptors_that_are_closed_are_taken_before_files_get_them(closed: str) -> None:
    """Writing to a missing stream does nothing."""
    code = (
        "import os, sys\n"
        "from quorate.machine import standard_streams as streams\n"
        "assert None in (sys.stdout, sys.stderr)\n"
        "streams.occupy_standard_descriptors()\n"
        "assert os.open('/dev/null', os.O_RDONLY) > 2\n"
        "assert all(os.get_inheritable(fd) for fd in (0, 1, 2))\n"
        "streams.flush_standard_streams()\n"
        # None would be standard output.
        "print('error', file=streams.Steady(sys.stderr), flush=True)\n"
    )
    ended = said_by(code, closed)
    expected = "" if "2>&-" in closed else "error\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", expected)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
def test_output_that_cannot_be_written_at_the_end_sets_no_exit_code() -> None:
    steady = "from quorate.machine.standard_streams import steady\n"
    assert said_by(f"{steady}with steady():\n    print(7)\n", ">/dev/full").returncode == 0


# --- knowledge of each other ----------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_a_process_that_is_stopped_and_one_that_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not this_host.has_ended(child.pid)
        assert not this_host.is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        soon(lambda: this_host.is_stopped(child.pid))
        assert not this_host.has_ended(child.pid)
        child.kill()
        soon(lambda: this_host.has_ended(child.pid))  # though nobody has waited for the child
        child.wait()
        assert this_host.has_ended(child.pid)
        assert not this_host.is_stopped(child.pid)


def test_a_host_has_one_mark_for_all_of_its_processes() -> None:
    said = said_by("from quorate.machine import this_host; print(this_host.mark())")
    assert said.stdout.strip() == this_host.mark()
    assert this_host.name() in this_host.mark()


# --- memory ---------------------------------------------------------------------------------------

PROGRAM = """
import resource, sys, threading
import torch
from quorate.machine.freed_memory import keep_freed_memory, return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def shard():
    return [torch.ones(each, dtype=torch.uint8) for each in (3 << 20, 30 << 20, 90 << 20)]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    shard()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def run():
    for _ in range(20):  # until holes of a freed block's size are left between smaller blocks
        shard()
    found.append(min(faults() for _ in range(3)))

found = []
keep_freed_memory()
run()
thread = threading.Thread(target=run)
thread.start()
thread.join()
kept = resident()
return_freed_memory()
print(*found, (kept - resident()) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_a_shard_frees_is_there_for_the_next_and_given_back_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    main, other, returned = map(int, done.stdout.split())
    assert main < 100
    assert other < 100
    assert returned > 100
