"""Every test leaves the process as before: no thread, child process, open file or segment."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import chain, groupby, islice
from pathlib import Path

import pytest
import torch
from support.messages import Messages
from support.references import References

from quorate.errors import SettingError
from quorate.machine.devices import worker_devices
from quorate.services.display import start_progress
from quorate.training import notices

# A shell may have background tests ignore these signals, and runs would inherit the setting.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)


# On a busy machine a start takes longer, and tests read all other lines of a fit.
start_progress.AFTER_S = 600.0


def _open_files() -> set[str]:
    paths = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            paths.add(target)
    return paths


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    # The folder is the machine's: files of other programs come and go too.
    ours = ("quorate", f"torch_{os.getpid()}_")
    if not folder.is_dir():
        return set()
    return {entry.name for entry in folder.iterdir() if entry.name.startswith(ours)}


# Slow files, in the order in which they begin. The first process has the files of FIRST alone: the
# tests there mostly wait. Other processes have the rest in turn, and no file is cut in two.
FIRST = ("test_ray.py", "test_hosts.py")
LONGEST = (*FIRST, "test_scenarios.py", "test_device.py", "test_collective.py", "test_examples.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option to rewrite the files of whole messages; see support/messages.py."""
    parser.addoption(
        "--update-messages",
        action="store_true",
        help="write the messages that the tests see into messages.txt of their rooms",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have the messages of each room compared with the room's file."""
    config.pluginmanager.register(Messages(config, Path(__file__).parent), "messages")


def _in_order(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return the tests in the order of equal shares of processes, in each the slow tests first.

    With ``--dist worksteal`` a process begins with such a share, and a process with nothing left to
    do takes the last tests of another share: at the end of a test run, short tests are left.
    """
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    slow.sort(key=lambda item: [*LONGEST, item.path.name].index(item.path.name))
    short = iter([item for item in items if item.get_closest_marker("slow") is None])
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for number, (path, of_file) in enumerate(groupby(slow, lambda item: item.path)):
        turn = 0 if path.name in FIRST else -1 - number % max(1, processes - 1)
        shares[turn].extend(of_file)
    left = len(items)
    for number, share in enumerate(shares):
        share.extend(islice(short, max(0, left // (processes - number) - len(share))))
        left -= len(share)
    return [*chain.from_iterable(shares), *short]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow tests first; skip tests of a GPU without a GPU, and say why."""
    items[:] = _in_order(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    wanting = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not wanting or torch.cuda.is_available() or hasattr(torch, "sim"):
        return
    try:
        worker_devices("cuda", None)
        reason = "torch.cuda.is_available() is False"
    except SettingError as error:
        reason = str(error)
    for item in wanting:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def references(request: pytest.FixtureRequest) -> References:
    """Return the references to compare runs with, computed once per test run."""
    return References.of_this_test_run(request)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Set one intra-op thread, as on a CPU worker and for kernels of simulated devices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process, an open file or a segment."""
    # Objects from before the test are not the test's garbage: torch's 300,000 objects, which take
    # 0.2 s to look through, as long as all else in most tests.
    gc.freeze()
    notices.forget()  # notices of earlier tests
    threads, files, segments = set(threading.enumerate()), _open_files(), _shared_memory()
    intra_op_threads = torch.get_num_threads()
    yield
    gc.collect()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # Except for autograd's threads of devices: Python has run in them, and they stay.
        ours = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]
        left = [t.name for t in ours if t not in threads]
        if not left and not multiprocessing.active_children():
            break
        time.sleep(0.02)
    assert not left, f"threads left: {left}"
    assert not multiprocessing.active_children(), "processes left"
    assert _open_files() <= files, f"files left open: {_open_files() - files}"
    assert _shared_memory() <= segments, f"segments left: {_shared_memory() - segments}"
    assert torch.get_num_threads() == intra_op_threads
