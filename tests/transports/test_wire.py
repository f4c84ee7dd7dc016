"""What passes between processes: messages, exceptions, memory, and whether data is the same."""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.errors import LossError, SettingError, UserError, WorkerError
from quorate.machine import shared_memory
from quorate.machine.shared_memory import Segment
from quorate.replica.fingerprint import fingerprint
from quorate.transports.processes import remote_error
from quorate.transports.processes.wire import Message, Wire

# --- the wire -------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.dictionaries(st.text(), JSON, max_size=4)


def framed(message: Message) -> bytes:
    payload = json.dumps(message).encode()
    return struct.pack("<I", len(payload)) + payload


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(1, 40), max_size=30))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    messages: list[Message], cuts: list[int]
) -> None:
    one, other = socket.socketpair()
    wire, data = Wire(other), b"".join(map(framed, messages))
    found = []
    for size in [*cuts, len(data)]:
        one.sendall(data[:size])
        data = data[size:]
        found += wire.arrived()
    assert not wire.is_cut
    one.close()
    assert wire.arrived() == []
    assert wire.is_cut
    assert found == messages
    assert wire.receive() is None
    wire.close()


def test_many_and_large_messages() -> None:
    one, other = Wire.pair()
    text = "x" * 300_000  # more than the sockets hold
    sender = threading.Thread(
        target=lambda: [one.send({"number": n, "text": text}) for n in range(20)]
    )
    sender.start()
    found = [other.receive() for _ in range(10)]
    while len(found) < 20:
        found += other.arrived()
    sender.join()
    assert found == [{"number": n, "text": text} for n in range(20)]
    one.close()
    other.close()


def test_descriptors_come_with_a_message_and_are_not_inherited() -> None:
    one, other = Wire.pair()
    segments = [Segment(4096 * (n + 1)) for n in range(3)]
    segments[1].map[:5] = b"hello"
    one.send({"kind": "arena"}, [segment.fd for segment in segments])
    one.send({"kind": "next"})
    assert [other.receive(), other.receive()] == [{"kind": "arena"}, {"kind": "next"}]
    assert len(other.fds) == 3
    assert not any(os.get_inheritable(fd) for fd in other.fds)
    theirs = [Segment(os.fstat(fd).st_size, fd) for fd in other.fds]
    assert [segment.nbytes for segment in theirs] == [4096, 8192, 12288]
    assert theirs[1].map[:5] == b"hello"
    one.close()
    other.close()


def test_a_message_to_one_that_is_gone_is_lost_without_an_error() -> None:
    one, other = Wire.pair()
    other.send({"last": "word"})
    other.close()
    one.send({"kind": "compute"})
    one.send({"kind": "compute"})
    one.send({"kind": "compute"}, [0])
    assert one.arrived() == [{"last": "word"}]
    assert one.is_cut
    one.close()


def test_what_was_sent_before_an_end_counts() -> None:
    one, other = Wire.pair()
    other.send({"last": "word"})
    other.close()
    assert one.arrived() == [{"last": "word"}]
    assert one.is_cut
    one.close()


def test_words_before_an_end_that_was_noticed_when_sending() -> None:
    """A worker sends its last result and ends, while the coordinator sends it something."""
    one, other = Wire.pair()
    other.send({"last": "word"})
    other.close()
    one.send({"kind": "compute"})
    assert one.arrived() == [{"last": "word"}]
    one.close()


# --- exceptions -----------------------------------------------------------------------------------


class OwnError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class SilentError(Exception):
    def __str__(self) -> str:
        return ""


def across(error: BaseException) -> BaseException:
    return remote_error.from_json(json.loads(json.dumps(remote_error.to_json(error))))


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as found:
        return found


def test_an_exception_keeps_frames_notes_and_causes() -> None:
    def inner() -> None:
        unprintable: Any = object()
        try:
            raise KeyError("a key")
        except KeyError as error:
            raise ValueError(f"a value and {type(unprintable).__name__}") from error

    with pytest.raises(ValueError, match="a value") as info:
        inner()
    error = info.value
    error.add_note("a note")
    found = across(error)
    assert type(found) is ValueError
    assert found.args == error.args
    assert found.__notes__ == ["a note"]
    assert type(found.__cause__) is KeyError
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(found.__traceback__)]
    assert frames == [
        (f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)
    ]
    shown = "".join(traceback.format_exception(found))
    assert "KeyError: 'a key'" in shown
    assert "direct cause" in shown
    assert 'raise ValueError(f"a value' in shown
    assert shown.endswith("a note\n")
    with pytest.raises(ValueError, match="a value"):
        raise found


def test_contexts_are_kept_unless_they_are_suppressed() -> None:
    try:
        try:
            raise KeyError("a key")
        except KeyError:
            raise ValueError("a value")  # noqa: B904
    except ValueError as error:
        found = across(error)
    assert type(found.__context__) is KeyError
    assert found.__cause__ is None
    try:
        try:
            raise KeyError("a key")
        except KeyError:
            raise ValueError("a value") from None
    except ValueError as error:
        found = across(error)
    assert found.__context__ is None


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RuntimeError("text"), RuntimeError, "text"),
        (KeyError("a"), KeyError, "'a'"),
        (KeyError(3), KeyError, "3"),
        (StopIteration(5), StopIteration, "5"),
        (SystemExit(3), WorkerError, "SystemExit: 3"),
        (KeyboardInterrupt(), WorkerError, "KeyboardInterrupt"),
        (AssertionError(), AssertionError, ""),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
        (LossError("no scalar"), LossError, "no scalar"),
        (
            SettingError("shards", 3, "more", "choose"),
            SettingError,
            "shards: got 3, expected more; choose",
        ),
        (
            FileNotFoundError(2, "No such file", "rows.bin"),
            Exception,
            "[Errno 2] No such file: 'rows.bin'",
        ),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), Exception, "can't decode byte 0xff"),
        (OwnError(1, 2), WorkerError, "OwnError: 1 and 2"),
        (SilentError(), WorkerError, "SilentError"),
        (json.JSONDecodeError("bad", "{", 1), WorkerError, "JSONDecodeError: bad"),
        (ExceptionGroup("several", [ValueError("one")]), Exception, "several (1 sub-exception)"),
    ],
)
def test_types_and_texts(error: BaseException, kind: type[BaseException], text: str) -> None:
    found = across(caught(error))
    assert isinstance(found, kind)
    assert text in str(found)
    # The user's mistakes stay such, and others do not become such.
    assert isinstance(found, UserError) == isinstance(error, UserError)
    assert "".join(traceback.format_exception(found))


def test_causes_in_a_circle_end() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert str(across(one)) == "one"


# --- fingerprints ---------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, 1, 1.0, "1", b"1", [1, 23], [12, 3], (1, 23), [[1], [23]], [], {}, {"a": 1},
    {"b": 1}, {"a": 2}, np.int64(1), np.float32(1), np.arange(3), np.arange(3.0), np.ones(3),
    torch.arange(3), torch.arange(3.0), torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6),
    torch.tensor(float("nan")), torch.zeros(2, dtype=torch.bfloat16), torch.ones(2).to_sparse(),
    [torch.zeros(1), "a"], [torch.zeros(1), "b"],
]  # fmt: skip


def test_other_values_have_another_fingerprint() -> None:
    found = [fingerprint(value) for value in VALUES]
    twins = [
        (VALUES[i], VALUES[j]) for i in range(len(found)) for j in range(i) if found[i] == found[j]
    ]
    assert not twins
    assert [fingerprint(value) for value in VALUES] == found


def test_the_same_values_have_one_fingerprint_wherever_they_lie() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert fingerprint(x.t()) == fingerprint(x.t().contiguous())
    assert fingerprint(x[:, ::2]) == fingerprint(x[:, ::2].clone())
    assert fingerprint(x.requires_grad_()) == fingerprint(x.detach())
    assert fingerprint(np.asfortranarray(np.eye(3))) == fingerprint(np.eye(3))


def test_what_has_no_values_of_its_own_counts_by_type() -> None:
    assert fingerprint({"a": object()}) == fingerprint({"a": object()})
    assert fingerprint({"a": np.array([object()])}) == fingerprint({"a": np.array([object()])})


# --- memory ---------------------------------------------------------------------------------------


def test_a_segment_is_the_users_alone_and_has_no_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    segment = Segment(1 << 16)
    status = os.fstat(segment.fd)
    assert (status.st_mode & 0o777, status.st_size, status.st_nlink) == (0o600, 1 << 16, 0)
    assert set(Path("/dev/shm").iterdir()) == before
    assert not os.get_inheritable(segment.fd)
    assert not any(segment.map[:])
    other = Segment(1 << 16, os.dup(segment.fd))
    segment.tensor(torch.float32, 3, 64).fill_(1.5)
    assert other.tensor(torch.float32, 3, 64).tolist() == [1.5] * 3
    assert other.tensor(torch.float32, 0, 0).shape == (0,)


def test_tensors_outlive_their_segment_and_its_descriptor_does_not() -> None:
    segment = Segment(4096)
    fd, tensor = segment.fd, segment.tensor(torch.int64, 4, 0)
    tensor.fill_(7)
    del segment
    gc.collect()
    assert tensor.tolist() == [7] * 4
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_more_than_there_can_be() -> None:
    with pytest.raises(UserError, match=r"shared memory: [\d,]+ MiB cannot be had \(.*\); use"):
        Segment(1 << 62)


def test_free_memory_is_known_and_both_figures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free = shared_memory.free_bytes()
    assert free is None or 1 << 20 < free < 1 << 50
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 5 << 20)
    shared_memory.require(5 << 20, "rows", "use less")
    with pytest.raises(
        UserError, match=r"^shared memory: rows need 6 MiB, and 5 MiB are free; use"
    ):
        shared_memory.require(6 << 20, "rows", "use less")
