"""The wire between coordinator and worker: whole messages in order, with descriptors."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.few_descriptors import no_descriptor_left

from quorate.errors import UserError
from quorate.machine.shared_memory import Segment
from quorate.transports.processes.wire import Message, Wire

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


def test_what_a_stopped_process_does_not_read_waits_and_blocks_nobody() -> None:
    one, other = Wire.pair()
    segment = Segment(4096)
    segment.map[:5] = b"hello"
    text = "x" * 10_000
    for number in range(200):  # more than the sockets hold
        one.post({"number": number, "text": text})
    one.post({"number": 200}, [segment.fd])
    one.post({"number": 201, "kind": "open"})
    assert one.has_unsent
    assert not one.withdraw(number=0)  # sent
    assert one.withdraw(number=199)
    assert one.withdraw(kind="open", number=201)
    assert not one.withdraw(kind="open", number=201)
    found: list[Message] = []
    while len(found) < 200:
        one.flush()
        found += other.arrived()
    assert not one.has_unsent
    assert [message["number"] for message in found] == [*range(199), 200]
    assert all(message.get("text", text) == text for message in found)
    theirs = Segment(4096, other.fds.pop())
    assert theirs.map[:5] == b"hello"
    one.close()
    other.close()


def test_a_message_of_which_a_part_was_sent_is_not_withdrawn() -> None:
    one, other = Wire.pair()
    one.post({"number": 0, "text": "x" * 3_000_000})
    assert one.has_unsent
    assert not one.withdraw(number=0)
    found: list[Message] = []
    while not found:
        one.flush()
        found = other.arrived()
    assert len(found[0]["text"]) == 3_000_000
    one.close()
    other.close()


def test_what_waits_for_one_that_is_gone_is_lost_without_an_error() -> None:
    one, other = Wire.pair()
    before = len([*Path("/dev/fd").iterdir()])
    for _ in range(3):
        one.post({"text": "x" * 500_000}, [0])
    other.close()
    one.flush()
    assert not one.has_unsent
    one.post({"kind": "compute"})
    assert not one.has_unsent
    assert len([*Path("/dev/fd").iterdir()]) <= before - 1  # no copy is left open
    one.close()


def test_descriptors_that_are_lost_on_their_way_are_named_at_once() -> None:
    """The kernel cuts them off, in silence, where the receiver has too many files open."""
    here, there = Wire.pair()
    with closing(here), closing(there):
        here.send({"kind": "open"}, [here.socket.fileno(), there.socket.fileno()])
        with no_descriptor_left(), pytest.raises(UserError, match="descriptors"):
            there.receive()
        here.send({"kind": "close"}, [here.socket.fileno()])
        assert there.receive() is not None
        assert len(there.fds) == 1
        os.close(there.fds.pop())
