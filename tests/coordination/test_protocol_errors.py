"""Events that cannot happen are refused, with the events before them.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import pytest
from support.messages import expect_error
from support.scripted import (
    coordinator,
    handle_all,
)

from quorate.coordination.protocol import (
    Applied,
    Cancelled,
    Done,
    Event,
    Failed,
    Joined,
    Left,
    Tick,
)
from quorate.errors import ProtocolError


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Joined(0), "worker 0 joined twice"),
        (Left(5, "killed"), "worker 5 left and had not joined"),
        (Done(0, 0, 1), "worker 0 was not computing step 0, shard 1"),
        (Done(0, 1, 0), "worker 0 was not computing step 1, shard 0"),
        (Done(5, 0, 0), "worker 5 was not computing step 0, shard 0"),
        (Failed(1, 0, 0), "worker 1 was not computing step 0, shard 0"),
        (Cancelled(0, 0, 0), "worker 0 left off what it was not told to"),
        (Applied(0), "no update of step 0 was asked for"),
    ],
    ids=str,
)
def test_an_impossible_event_is_refused_with_the_events_before_it(
    event: Event, message: str
) -> None:
    c = coordinator(shards=2, joined=2)
    with pytest.raises(ProtocolError) as caught:
        c.handle(event, 1.0)
    assert str(caught.value) == "\n".join(
        [
            f"{message} (after 0 updates, computing)",
            "last events, oldest first:",
            "  Joined(worker=0)",
            "  Joined(worker=1)",
            f"  {event}",
        ]
    )


def test_an_update_of_another_step_is_refused() -> None:
    c = coordinator(shards=1, steps=2, joined=1)
    c.handle(Done(0, 0, 0), 1.0)
    with expect_error(ProtocolError):
        c.handle(Applied(1), 2.0)


def test_a_protocol_error_carries_twenty_events_at_most() -> None:
    c = coordinator(shards=1, joined=1)
    handle_all(c, 0.0, *[Tick()] * 50)
    with pytest.raises(ProtocolError) as caught:
        c.handle(Joined(0), 1.0)
    assert len(str(caught.value).splitlines()) == 2 + 20
