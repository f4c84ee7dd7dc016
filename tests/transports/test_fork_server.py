"""The nursery: its forks are as processes started from nothing, and nobody outlives anybody."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.references import References
from support.runs import command, last_json, processes_of, run_all

from quorate.transports.processes import fork_server as nursery
from quorate.transports.processes import starter as birth
from quorate.transports.processes.script import Script
from quorate.transports.processes.starter import Births, FromNothing, Nursery
from quorate.transports.processes.wire import Wire
from quorate.transports.processes.worker_process import Life

pytestmark = pytest.mark.skipif(not birth.can_fork(), reason="workers are started from nothing")


def script(folder: Path, text: str, name: str = "script.py") -> Script:
    (folder / name).write_text(text)
    return Script(str(folder / name), None, (), str(folder), None)


def descriptors(pid: int | str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def lived(births: Births, script: Script, *, wait_s: float = 30.0) -> Life:
    """A worker that has ended. Close it."""
    life = Life(0, script, births)
    assert life.wait(wait_s)
    return life


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """A word that all processes of this file have."""
    word = uuid.uuid4().hex
    os.environ["QUORATE_TEST"] = word
    yield f"QUORATE_TEST={word}"
    del os.environ["QUORATE_TEST"]


@pytest.fixture(scope="module")
def births(mark: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """One nursery for all tests; who kills it gets another."""
    folder = tmp_path_factory.mktemp("births")
    births = Nursery(script(folder, ""), spins=False)
    yield births
    births.close()
    assert not [pid for pid in processes_of(mark) if pid != os.getpid()]


# --- what a fork is -------------------------------------------------------------------------------

ABOUT_ITSELF = """
import json, os, random, signal, sys, numpy, torch
from pathlib import Path
def links(pid):
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except OSError:
            pass
    return found
def tasks(pid):
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
about = {
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(),
    "group": os.getpgid(0) == os.getpid(),
    "fds": links("self"), "tasks": tasks("self"),
    "ignored": [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN],
    "command": Path("/proc/self/cmdline").read_text().split("\\0"),
    "random": [random.random(), float(numpy.random.rand()), torch.initial_seed()],
    "spins": os.environ.get("OMP_WAIT_POLICY"), "threads": torch.get_num_threads(),
}
Path(__file__).with_suffix(f".{os.getpid()}").write_text(json.dumps(about))
"""


def kind(link: str) -> str:
    return link.rpartition("/")[0] if link.startswith("/") else link.partition(":")[0]


def abouts(births: Births, what: Script) -> list[dict[str, Any]]:
    """What two workers that live side by side say of themselves."""
    lives = [Life(number, what, births) for number in range(2)]
    try:
        assert all(life.wait(30.0) for life in lives)
        names = [Path(what.path).with_suffix(f".{life.pid}") for life in lives]
        return [json.loads(name.read_text()) for name in names]
    finally:
        for life in lives:
            life.close()


def test_a_fork_is_as_a_process_from_nothing(births: Nursery, tmp_path: Path) -> None:
    what = script(tmp_path, ABOUT_ITSELF)
    alone = FromNothing(what, spins=False)
    forks, others = abouts(births, what), abouts(alone, what)
    assert births._script.folder == forks[0]["folder"]
    alone.close()
    assert not set(forks[0]["random"]) & set(forks[1]["random"])
    for fork, other in zip(forks, others, strict=True):
        # Its end of the wire and its output: nothing of the nursery's, or of the other's.
        held = [sorted(kind(name) for name in each["fds"].values()) for each in (fork, other)]
        assert held[0] == held[1]
        assert held[0].count("socket") == 1
        assert fork["tasks"] == 1
        assert "lifeline.py" in " ".join(fork["command"])
        for name in ("fds", "tasks", "command", "random", "folder"):
            del fork[name], other[name]
        assert fork == other
    assert forks[0]["group"]
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} <= set(forks[0]["ignored"])
    assert forks[0]["spins"] == "passive"


def test_the_nursery_keeps_one_thread_and_nothing_of_its_forks(
    births: Nursery, tmp_path: Path
) -> None:
    def held() -> tuple[int, int]:
        assert births._popen is not None
        proc = Path(f"/proc/{births._popen.pid}")
        return len(list((proc / "task").iterdir())), descriptors(births._popen.pid)

    what = script(tmp_path, "")
    for number in range(4):
        lived(births, what).close()
        if number == 0:
            first = held()
    assert first[0] == 1
    assert held() == first


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


def test_how_a_fork_ended_is_known(births: Nursery, tmp_path: Path) -> None:
    for text, said in ENDS.items():
        life = lived(births, script(tmp_path, text))
        assert life.how_it_ended() == said, text
        life.close()
    # As any program it ends with its traceback, and does what it wanted done at its end.
    text = (
        "import atexit, sys, threading\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Timer(0.1, print, ['a thread']).start()\n"
        "def fail(): raise ValueError(7)\n"
        "sys.stdout.write('no newline, ')\n"
        "fail()\n"
    )
    life = lived(births, script(tmp_path, text))
    said, killed = life.how_it_ended()
    life.close()
    assert said.startswith("ended with exit code 1 while starting: ")
    assert 'script.py", line 4, in fail' in said
    assert "ValueError: 7" in said
    assert "no newline, " in said
    assert said.endswith("a thread\nat exit")
    assert not killed


# --- faults ---------------------------------------------------------------------------------------

SLEEPS = "import time; time.sleep(1000)"


def answered(life: Life) -> Life:
    deadline = time.monotonic() + 30
    while life.pid is None:
        assert not life.has_ended()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return life


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_worker_is_killed_before_it_was_forked(mark: str, tmp_path: Path) -> None:
    before = descriptors("self")
    births = Nursery(script(tmp_path, SLEEPS), spins=False)
    lives = [Life(number, births._script, births) for number in range(2)]
    lives[0].kill("a reason")  # the nursery imports
    assert lives[0].pid is None
    assert lives[0].wait(5.0)
    assert lives[0].how_it_ended() == ("a reason", False)
    assert lives[1].wait(5.0)  # with its nursery
    assert lives[1].how_it_ended() == ("was killed by signal 9 (SIGKILL)", True)
    for life in lives:
        life.close()
    # The next one has another nursery; what was never waited for is closed likewise.
    life = answered(Life(0, births._script, births))
    assert life.pid in processes_of(mark)
    unanswered = Life(1, births._script, births)
    unanswered.close()
    life.close()
    births.close()
    assert descriptors("self") == before


def test_forks_die_with_their_nursery(births: Nursery, tmp_path: Path) -> None:
    lives = [answered(Life(n, script(tmp_path, SLEEPS), births)) for n in range(2)]
    assert births._popen is not None
    old = births._popen.pid
    os.kill(old, signal.SIGKILL)
    for life in lives:
        assert life.wait(5.0)
        assert life.pid is not None
        assert not is_alive(life.pid)
        assert life.how_it_ended() == ("was killed by signal 9 (SIGKILL)", True)
        life.close()
    lived(births, script(tmp_path, "")).close()
    assert births._popen.pid != old


def test_a_nursery_that_hangs_hides_no_death(births: Nursery, tmp_path: Path) -> None:
    life = answered(Life(0, script(tmp_path, SLEEPS), births))
    assert births._popen is not None
    assert life.pid is not None
    os.kill(births._popen.pid, signal.SIGSTOP)
    assert not life.wait(0.1)
    os.kill(life.pid, signal.SIGKILL)
    assert life.wait(5.0)
    assert life.how_it_ended() == ("was killed by signal 9 (SIGKILL)", True)
    life.close()
    # One that is not forked in time is killed, and takes its nursery along.
    late = Life(0, script(tmp_path, SLEEPS), births)
    late.kill("too late")
    assert late.wait(5.0)
    late.close()


def test_a_fork_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, births: Nursery) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    here, there = Wire.pair()
    report, theirs = Wire.pair()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    one = nursery._Nursery(there)
    assert not one._forks(theirs, nursery._Task([], *fds))
    one._selector.close()
    process = birth._Forked(births._popen, report)  # type: ignore[arg-type]
    assert process.has_ended()
    assert process.error == "[Errno 11] Resource temporarily unavailable"
    process.close()
    for wire in (here, there):
        wire.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.close(fd)


def test_the_same_bits_though_the_nursery_is_killed_and_without_one(
    references: References,
) -> None:
    updates = "30"
    expected = references.on_a_tower("orphans.py", "none", updates).json["digest"]
    options = ("--workers", "2")
    ended = run_all(
        {how: command("orphans.py", how, updates, options=options) for how in ("nursery", "alone")}
    )
    for how, run in ended.items():
        assert run.code == 0, run.said
        found = last_json(run.out)
        assert found["digest"] == expected, how
        assert found["killed"] == (2 if how == "nursery" else 1)
        assert run.said.count("killed by signal 9 (SIGKILL)") == found["killed"]
        assert run.said.count("another is starting") == found["killed"]
