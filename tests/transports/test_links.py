"""Links between the processes of stages: whatever goes wrong at an end, nobody waits for ever."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest
import torch
from support.messages import expect_error

from quorate.data.parcel import pack
from quorate.errors import SettingError, UserError
from quorate.transports.stages.arrivals import Ends
from quorate.transports.stages.links import GoneError, Links
from quorate.transports.stages.process import Shared
from quorate.transports.stages.stage_processes import StageProcesses
from quorate.transports.stages.stage_threads import StageThreads


class Raising:
    """What can be pickled, and raises where it is read."""

    def __setstate__(self, state: Any) -> None:
        raise KeyError("lost its table")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


@contextmanager
def no_threads(allowed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block only so many threads can be started."""
    start = threading.Thread.start
    left = [allowed]

    def limited(thread: threading.Thread) -> None:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        yield


def test_a_value_that_cannot_be_read_is_said_and_the_link_is_lost() -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(Links({7: ours})) as links:
        pack(theirs, ("key", Raising()))
        with expect_error(SettingError, name="split", got="KeyError: 'lost its table'"):
            links.take("key")
        with pytest.raises(GoneError):
            links.take("key")


def test_links_that_have_no_room_for_a_thread_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    pairs = [socket.socketpair() for _ in range(3)]
    with no_threads(1, monkeypatch), pytest.raises(RuntimeError, match="new thread"):
        Links({number: ours for number, (ours, _) in enumerate(pairs)})
    assert threading.active_count() == before
    assert all(ours.fileno() == -1 for ours, _ in pairs)
    for _, theirs in pairs:
        theirs.close()


def wait_for_nothing(_number: int, links: Ends, _shared: Shared) -> None:
    with pytest.raises(GoneError):
        links.take("nothing")


def test_threads_of_stages_of_which_one_cannot_start_leave_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.active_count()
    cpu = torch.device("cpu")
    with no_threads(2, monkeypatch), pytest.raises(RuntimeError, match="new thread"):
        StageThreads([cpu, cpu, cpu], Shared((), 3), wait_for_nothing)
    assert threading.active_count() == before


def test_processes_of_stages_whose_links_fail_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with no_threads(1, monkeypatch), pytest.raises(RuntimeError, match="new thread"):
        StageProcesses(2, Shared((), 2), wait_for_nothing)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_too_few_descriptors_for_stages_are_refused_with_both_figures() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    try:
        with expect_error(UserError, name="descriptors", hide=r"\d+(?= of 40)"):
            StageProcesses(4, Shared((), 4), wait_for_nothing)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
