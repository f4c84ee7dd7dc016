"""The fork server: its forks are as new interpreters, and nobody outlives anybody."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.about_itself import ABOUT_ITSELF, kind
from support.references import References
from support.runs import command, last_json, processes_of, run_all

from quorate.transports.processes import fork_server
from quorate.transports.processes.script import Script
from quorate.transports.processes.starter import ForkServer, Spawner, Starter, _Forked, can_fork
from quorate.transports.processes.wire import Wire
from quorate.transports.processes.worker_process import WorkerProcess

pytestmark = pytest.mark.skipif(
    not can_fork(), reason="a new interpreter is spawned for each worker"
)


def script(folder: Path, text: str, name: str = "script.py") -> Script:
    (folder / name).write_text(text)
    return Script(str(folder / name), None, (), str(folder), None)


def descriptors(pid: int | str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def ended_process(starter: Starter, script: Script, *, wait_s: float = 30.0) -> WorkerProcess:
    """A worker that has ended. Close it."""
    process = WorkerProcess(0, script, starter)
    assert process.wait(wait_s)
    return process


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """A word that all processes of this file have."""
    word = uuid.uuid4().hex
    os.environ["QUORATE_TEST"] = word
    yield f"QUORATE_TEST={word}"
    del os.environ["QUORATE_TEST"]


@pytest.fixture(scope="module")
def starter(mark: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One fork server for all tests; who kills it gets another."""
    folder = tmp_path_factory.mktemp("starter")
    starter = ForkServer(script(folder, ""), spins=False)
    yield starter
    starter.close()
    assert not [pid for pid in processes_of(mark) if pid != os.getpid()]


# --- what a fork is -------------------------------------------------------------------------------

WRITES = 'Path(__file__).with_suffix(f".{os.getpid()}").write_text(json.dumps(about))'


def abouts(starter: Starter, what: Script) -> list[dict[str, Any]]:
    """What two workers that live side by side say of themselves."""
    processes = [WorkerProcess(number, what, starter) for number in range(2)]
    try:
        assert all(process.wait(60.0) for process in processes)
        names = [Path(what.path).with_suffix(f".{process.pid}") for process in processes]
        return [json.loads(name.read_text()) for name in names]
    finally:
        for process in processes:
            process.close()


@pytest.mark.slow
def test_a_fork_is_as_a_new_interpreter(starter: ForkServer, tmp_path: Path) -> None:
    what = script(tmp_path, ABOUT_ITSELF + WRITES)
    alone = Spawner(what, spins=False)
    forks, others = abouts(starter, what), abouts(alone, what)
    assert starter._script.folder == forks[0]["folder"]
    alone.close()
    assert not set(forks[0]["random"]) & set(forks[1]["random"])
    for fork, other in zip(forks, others, strict=True):
        # Its end of the wire and its output: nothing of the fork server's, or of the other's.
        held = [sorted(kind(name) for name in each["fds"].values()) for each in (fork, other)]
        assert held[0] == held[1]
        assert held[0].count("socket") == 1
        assert fork["tasks"] == 1
        assert "dies_with_parent.py" in " ".join(fork["command"])
        for name in ("fds", "tasks", "command", "random", "folder"):
            del fork[name], other[name]
        assert fork == other
    assert forks[0]["group"]
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} <= set(forks[0]["ignored"])
    assert forks[0]["spins"] == "passive"


def test_the_fork_server_keeps_one_thread_and_nothing_of_its_forks(
    starter: ForkServer, tmp_path: Path
) -> None:
    def held() -> tuple[int, int]:
        assert starter._server is not None
        proc = Path(f"/proc/{starter._server.process.pid}")
        return len(list((proc / "task").iterdir())), descriptors(starter._server.process.pid)

    def settled() -> tuple[int, int]:
        """What it holds when that has not changed for half a second: a fork's are closed late."""
        seen, since = held(), time.monotonic()
        while time.monotonic() - since < 0.5:
            time.sleep(0.02)
            if (now := held()) != seen:
                seen, since = now, time.monotonic()
        return seen

    what = script(tmp_path, "")
    for number in range(4):
        ended_process(starter, what).close()
        if number == 0:
            first = settled()
    assert first[0] == 1
    assert settled() == first


# script -> how it is said to have ended, and whether it was killed from outside
ENDS = {
    "import sys; sys.exit(3)": ("ended with exit code 3 while starting: it printed nothing", False),
    "import os; os._exit(4)": ("ended with exit code 4 while starting: it printed nothing", False),
    "import sys; sys.exit('words')": ("ended with exit code 1 while starting: words", False),
    "import os; os.kill(os.getpid(), 11)": ("was killed by signal 11 (SIGSEGV)", False),
    "import os; os.kill(os.getpid(), 9)": ("was killed by signal 9 (SIGKILL)", True),
    "": (
        "ended with exit code 1 while starting: the script came to its end without a training loop",
        False,
    ),
}


def test_how_a_fork_ended_is_known(starter: ForkServer, tmp_path: Path) -> None:
    for text, said in ENDS.items():
        process = ended_process(starter, script(tmp_path, text))
        ending = process.ending()
        assert (ending.text(had_joined=False), ending.is_kill) == said, text
        process.close()
    # As any program it ends with its traceback, and does what it wanted done at its end.
    text = (
        "import atexit, sys, threading\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Timer(0.5, print, ['a thread']).start()\n"
        "def fail(): raise ValueError(7)\n"
        "sys.stdout.write('no newline, ')\n"
        "fail()\n"
    )
    process = ended_process(starter, script(tmp_path, text))
    ending = process.ending()
    said = ending.text(had_joined=False)
    process.close()
    assert said.startswith("ended with exit code 1 while starting: ")
    assert 'script.py", line 4, in fail' in said
    assert "ValueError: 7" in said
    assert "no newline, " in said
    assert said.endswith("a thread\nat exit")
    assert not ending.is_kill


# --- faults ---------------------------------------------------------------------------------------

SLEEPS = "import time; time.sleep(1000)"


def forked(process: WorkerProcess) -> WorkerProcess:
    deadline = time.monotonic() + 60
    while process.pid is None:
        assert not process.has_ended()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return process


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_worker_is_killed_before_it_was_forked(mark: str, tmp_path: Path) -> None:
    before = descriptors("self")
    starter = ForkServer(script(tmp_path, SLEEPS), spins=False)
    processes = [WorkerProcess(number, starter._script, starter) for number in range(2)]
    processes[0].kill()  # the fork server imports
    assert processes[0].pid is None
    assert processes[0].wait(60.0)
    assert processes[0].ending().is_kill
    assert processes[1].wait(60.0)  # with its fork server
    assert processes[1].ending().is_kill
    for process in processes:
        process.close()
    # The next one has another fork server; what was never waited for is closed likewise.
    process = forked(WorkerProcess(0, starter._script, starter))
    assert process.pid in processes_of(mark)
    unanswered = WorkerProcess(1, starter._script, starter)
    unanswered.close()
    process.close()
    starter.close()
    assert descriptors("self") == before


def test_forks_die_with_their_server(starter: ForkServer, tmp_path: Path) -> None:
    processes = [forked(WorkerProcess(n, script(tmp_path, SLEEPS), starter)) for n in range(2)]
    assert starter._server is not None
    old = starter._server.process.pid
    os.kill(old, signal.SIGKILL)
    for process in processes:
        assert process.wait(60.0)
        assert process.pid is not None
        assert not is_alive(process.pid)
        assert process.ending().is_kill
        process.close()
    ended_process(starter, script(tmp_path, "")).close()
    assert starter._server.process.pid != old


def test_a_fork_server_that_hangs_hides_no_death(starter: ForkServer, tmp_path: Path) -> None:
    process = forked(WorkerProcess(0, script(tmp_path, SLEEPS), starter))
    assert starter._server is not None
    assert process.pid is not None
    os.kill(starter._server.process.pid, signal.SIGSTOP)
    assert not process.wait(0.1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60.0)
    assert process.ending().is_kill
    process.close()
    # One that is not forked in time is killed, and takes its fork server along.
    late = WorkerProcess(0, script(tmp_path, SLEEPS), starter)
    late.kill()
    assert late.wait(60.0)
    late.close()


def test_a_fork_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    of_server = subprocess.Popen([sys.executable, "-c", ""])
    of_server.wait()

    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    here, there = Wire.pair()
    report, theirs = Wire.pair()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    server = fork_server._ForkServer(there)
    assert not server._forks(theirs, fork_server._Task([], {}, *fds))
    server._selector.close()
    process = _Forked(of_server, report)  # type: ignore[arg-type]
    assert process.has_ended()
    assert process.error == "[Errno 11] Resource temporarily unavailable"
    process.close()
    for wire in (here, there):
        wire.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.close(fd)


@pytest.mark.slow
def test_the_same_bits_though_the_fork_server_is_killed_and_without_one(
    references: References,
) -> None:
    updates = "30"
    expected = references.on_a_tower("orphans.py", "none", updates).json["digest"]
    options = ("--workers", "2")
    ended = run_all(
        {how: command("orphans.py", how, updates, options=options) for how in ("server", "alone")}
    )
    for how, run in ended.items():
        assert run.code == 0, run.said
        found = last_json(run.out)
        assert found["digest"] == expected, how
        assert found["killed"] == (2 if how == "server" else 1)
        assert run.said.count("killed by signal 9 (SIGKILL)") == found["killed"]
        assert run.said.count("another is starting") == found["killed"]
