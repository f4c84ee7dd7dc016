"""Opening and ending worker processes: a failure leaves nothing open, and each wait has a bound."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from support.few_descriptors import no_descriptor_left

from quorate.errors import WorkerError
from quorate.machine.devices import Group
from quorate.replica.notes import Notes
from quorate.transports.as_worker import own_process
from quorate.transports.processes.script import Script
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.wire import Wire
from quorate.transports.processes.worker_process import KILLED_S, WorkerProcess

SCRIPT = Script(__file__, None, (), str(Path(__file__).parent), None)


class Stuck:
    """A process that signal 9 does not end: it hangs in the kernel."""

    pid: int | None = 1
    exit: int | None = None
    error: str | None = None

    def __init__(self) -> None:
        self.did: list[Any] = []

    def start(self, wire: Wire, output: IO[bytes]) -> Stuck:
        return self

    def has_ended(self) -> bool:
        return False

    def kill(self) -> None:
        self.did.append("kill")

    def wait(self, timeout_s: float | None = None) -> int | None:
        assert timeout_s is not None, "this would wait for ever"
        self.did.append(timeout_s)
        return None

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.did.append("close")


class OpenSite:
    """A site that notes whether it was closed."""

    servers = None
    takes_runs = True
    is_closed = False

    def start(self, number: int) -> Any:
        raise AssertionError(f"worker {number} is started, with no descriptor left")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class NoArena:
    """An arena of which a failing constructor sees no more than this."""

    takes_runs = True

    def described(self) -> tuple[None, list[int]]:
        return None, []


def descriptors() -> set[str]:
    return set(os.listdir("/dev/fd"))  # noqa: PTH208


def test_a_site_is_closed_where_what_waits_for_its_workers_cannot_be_opened() -> None:
    site, model, arena = OpenSite(), torch.nn.Linear(1, 1), NoArena()
    groups: list[Group] = [(torch.device("cpu"),)]
    parts: Any = (SCRIPT, site, arena, model, None, None, groups, {})
    before = descriptors()
    with no_descriptor_left(), pytest.raises(WorkerError, match="open files"):
        Processes(*parts, threads=1, decided={}, timeout_s=1.0, say=print, notes=Notes())
    assert site.is_closed
    assert descriptors() == before


def test_a_process_that_signal_9_does_not_end_is_waited_for_with_a_bound() -> None:
    stuck, before = Stuck(), descriptors()
    WorkerProcess(0, SCRIPT, stuck).close()
    assert stuck.did == ["kill", KILLED_S, "close"]
    assert descriptors() == before


def test_a_process_that_cannot_be_told_its_script_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise MemoryError

    monkeypatch.setattr(own_process, "facts", fails)
    stuck, before = Stuck(), descriptors()
    with pytest.raises(MemoryError):
        WorkerProcess(0, SCRIPT, stuck)
    assert stuck.did == ["kill", KILLED_S, "close"]
    assert descriptors() == before
