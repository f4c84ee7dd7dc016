"""Workers of the coordinator's own node: their wires are handed over, and their ends are seen."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from quorate.transports.processes.alarm import Alarm
from quorate.transports.processes.wire import Wire
from quorate.transports.ray import near
from quorate.transports.ray.near import Door, hand_over


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door()) as door:
        yield door


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its standard input does."""
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        yield process


def test_wires_are_handed_over_by_their_keys(door: Door, process: subprocess.Popen[bytes]) -> None:
    workers = {}
    for key in ("a", "b"):
        ours, workers[key] = Wire.pair()
        handle = os.pidfd_open(process.pid)
        assert hand_over(door.name, key, ours, handle)
        ours.close()  # the one that was handed over lives
        os.close(handle)
    taken = {key: door.take(key) for key in ("b", "a")}
    for key, worker in workers.items():
        worker.send({"kind": "here", "key": key})
        assert taken[key].line.wire.receive() == {"kind": "here", "key": key}
        assert not taken[key].has_ended()
    assert process.stdin is not None
    process.stdin.close()
    for key, worker in workers.items():
        taken[key].close()  # waits for the end
        assert worker.receive() is None
        worker.close()


def test_a_selector_tells_of_messages_and_of_the_end(
    door: Door, process: subprocess.Popen[bytes]
) -> None:
    heard = []
    ours, worker = Wire.pair()
    handle = os.pidfd_open(process.pid)
    hand_over(door.name, "a", ours, handle)
    ours.close()
    os.close(handle)
    with closing(selectors.DefaultSelector()) as selector, closing(door.take("a")) as taken:
        taken.watch(selector, lambda: heard.append("wire"), lambda: heard.append("process"))
        worker.send({"kind": "here"})
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        for key, _ in selector.select():
            key.data()
        assert sorted(heard) == ["process", "wire"]
        assert taken.has_ended()
    worker.close()


def test_the_door_is_this_users_alone_and_leaves_nothing(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, worker = Wire.pair()
    monkeypatch.setattr(os, "getuid", lambda: -1)  # as if the other end were another user's
    assert not hand_over(door.name, "a", ours, ours.socket.fileno())
    monkeypatch.undo()
    door.close()
    assert not hand_over(door.name, "a", ours, ours.socket.fileno())
    ours.close()
    worker.close()


def test_what_was_never_handed_over_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "HANDED_S", 0.1)
    with closing(Door()) as door, pytest.raises(TimeoutError):
        door.take("a")


def test_an_alarm_that_is_closed_in_the_round_in_which_it_rang_is_silent() -> None:
    """A worker's end and its agent's last word may come at once; the first closes both."""
    rung = []
    with closing(selectors.DefaultSelector()) as selector:
        alarm = Alarm(selector, lambda: rung.append(1))
        alarm.ring()
        ready = selector.select()
        alarm.close()
        for key, _ in ready:
            key.data()
    assert not rung


class Meeting:
    """A call of the system on a descriptor, while another thread is about to close that.

    Args:
        close: what the other thread calls.
        use: the call.
    """

    def __init__(self, close: Callable[[], None], use: Callable[..., object]) -> None:
        self.closer = threading.Thread(target=close)
        self._use = use

    def __call__(self, descriptor: int, *arguments: object) -> object:
        before = os.fstat(descriptor)
        self.closer.start()
        self.closer.join(0.2)  # long enough for a close that waits for nobody
        spares = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # take numbers that are free
        try:
            assert os.path.samestat(os.fstat(descriptor), before)
            return self._use(descriptor, *arguments)
        finally:
            for spare in spares:
                os.close(spare)


def test_a_worker_is_killed_by_its_own_descriptor_while_another_thread_closes(
    door: Door, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, worker = Wire.pair()
    handle = os.pidfd_open(process.pid)
    hand_over(door.name, "a", ours, handle)
    ours.close()
    os.close(handle)
    taken = door.take("a")
    monkeypatch.setattr(near, "END_S", 0.0)  # the end of the worker is not waited for
    meeting = Meeting(taken.close, signal.pidfd_send_signal)
    monkeypatch.setattr(signal, "pidfd_send_signal", meeting)
    taken.kill()
    monkeypatch.undo()
    meeting.closer.join()
    assert process.wait(10) == -signal.SIGKILL
    taken.kill()  # it is closed: no mistake
    assert taken.has_ended()
    worker.close()


def test_an_alarm_rings_in_its_own_pipe_while_another_thread_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(selectors.DefaultSelector()) as selector:
        alarm = Alarm(selector)
        meeting = Meeting(alarm.close, os.write)
        monkeypatch.setattr(os, "write", meeting)
        alarm.ring()
        monkeypatch.undo()
        meeting.closer.join()
        alarm.ring()  # it is closed: no mistake
        alarm.close()


def test_a_handler_of_signals_rings_in_the_middle_of_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rung = []
    write = os.write
    with closing(selectors.DefaultSelector()) as selector:
        alarm = Alarm(selector, lambda: rung.append(1))

        def interrupted(descriptor: int, text: bytes) -> int:
            monkeypatch.undo()
            alarm.ring()
            return write(descriptor, text)

        monkeypatch.setattr(os, "write", interrupted)
        alarm.ring()
        for key, _ in selector.select():
            key.data()
        alarm.close()
    assert rung == [1]
