"""A selector looks for room only while something waits, and is told so once."""

from __future__ import annotations

from contextlib import closing
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any

from quorate.transports.processes.wire import Message, WatchedWire, Wire


class Counting(DefaultSelector):
    modified = 0

    def modify(self, *args: Any, **kwargs: Any) -> Any:
        self.modified += 1
        return super().modify(*args, **kwargs)


def test_room_is_looked_for_while_something_waits() -> None:
    ours, theirs = Wire.pair()
    line = WatchedWire(ours)
    with Counting() as selector, closing(theirs), closing(line):
        line.watch(selector, line.flush)
        for number in range(3):
            line.post({"number": number})
        assert selector.modified == 0
        for number in range(3, 6):
            line.post({"number": number, "text": "x" * 500_000})  # more than the sockets hold
        assert selector.modified == 1
        assert selector.get_key(ours.socket).events == EVENT_READ | EVENT_WRITE
        found: list[Message] = []
        while len(found) < 6:
            found += theirs.arrived()
            for key, _ in selector.select(0.0):
                key.data()
        assert [message["number"] for message in found] == [*range(6)]
        assert selector.modified == 2
        assert selector.get_key(ours.socket).events == EVENT_READ


def test_who_is_deaf_may_be_sent_more_than_it_takes() -> None:
    ours, theirs = Wire.pair()
    line = WatchedWire(ours)
    with Counting() as selector, closing(theirs), closing(line):
        line.watch(selector, line.flush)
        line.deaf()
        line.deaf()
        line.post({"text": "x" * 3_000_000})
        assert not selector.get_map()
        line.flush()
        assert selector.modified == 0
