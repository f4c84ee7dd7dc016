"""Messages of every shard travel as records, which say the same as JSON would."""

from __future__ import annotations

import json
import math
import struct

from hypothesis import example, given
from hypothesis import strategies as st

from quorate.transports.processes import records
from quorate.transports.processes.records import Message
from quorate.transports.processes.wire import Wire

NUMBERS = st.integers(0, 2**62)
FLOATS = st.floats(width=64)  # infinite ones, and those that are no number, too
COMPUTE = st.fixed_dictionaries(
    {
        "kind": st.just("compute"),
        "job": NUMBERS,
        "ticket": NUMBERS,
        "step": NUMBERS,
        "shard": NUMBERS,
        "slot": st.none() | NUMBERS,
        "snapshot": st.none() | st.tuples(NUMBERS, NUMBERS).map(list),
        "rank_of": st.tuples(NUMBERS, NUMBERS).map(list),
        "is_needed": st.booleans(),
    },
    optional={"more": st.lists(st.none() | NUMBERS, min_size=1, max_size=3)},
)
DONE = st.fixed_dictionaries(
    {
        "kind": st.just("done"),
        "job": NUMBERS,
        "ticket": NUMBERS,
        "weight": FLOATS,
        "metrics": st.dictionaries(st.text(), FLOATS, max_size=4),
        "missing": st.none() | st.lists(st.text(), max_size=2),
        "totals": st.dictionaries(st.text(), st.just([[1], "AA=="]), max_size=1),
    }
)


def several(done: Message, sums: list[float]) -> Message:
    """A run: more shards with the same metrics, and other sums."""
    rest = [{**done, "metrics": dict.fromkeys(done["metrics"], each)} for each in sums]
    fields = ("weight", "metrics", "missing", "totals")
    return {**done, "more": [{name: each[name] for name in fields} for each in rest]}


RUN = st.builds(several, DONE, st.lists(FLOATS, min_size=1, max_size=3))
LEFT_OFF = st.fixed_dictionaries({"kind": st.just("left off"), "job": NUMBERS, "ticket": NUMBERS})
MESSAGES = COMPUTE | DONE | RUN | LEFT_OFF


def bits(message: Message) -> object:
    """Return a message with its floating point numbers as bytes: one that is none equals itself."""

    def of(value: object) -> object:
        match value:
            case float():
                return struct.pack("<d", value)
            case dict():
                return [(key, of(inner)) for key, inner in value.items()]
            case list():
                return [of(inner) for inner in value]
        return value

    return {key: of(value) for key, value in message.items()}


@given(MESSAGES)
def test_a_record_is_read_as_it_was_written(message: Message) -> None:
    record = records.packed(message)
    if record is not None:
        found = records.unpacked(record)
        assert found is not None
        assert bits(found) == bits(message)


@given(COMPUTE | LEFT_OFF | DONE.map(lambda m: {**m, "metrics": {"loss": 1.0}}))
def test_what_every_shard_costs_is_a_record(message: Message) -> None:
    is_usual = not message.get("missing") and not message.get("totals")
    assert (records.packed(message) is not None) == is_usual


@given(MESSAGES.map(lambda m: {**m, "amendments": {}}))
def test_what_is_not_as_usual_is_none(message: Message) -> None:
    assert records.packed(message) is None


@given(st.dictionaries(st.text(), st.text()))
@example({"blob": ""})  # a record has bytes
@example({"kind": "compute", "blob": "C"})
def test_json_is_no_record(message: Message) -> None:
    assert records.packed(message) is None
    assert records.unpacked(json.dumps(message).encode()) is None


def test_both_kinds_travel_in_their_order() -> None:
    usual: Message = {"kind": "done", "job": 1, "ticket": 2, "weight": 3.0, "totals": {}}
    metrics = {"loss": -0.0, "top 5 \u20ac": math.inf}
    sent = [
        {**usual, "metrics": metrics, "missing": None},
        {"kind": "note", "text": "n", "is_doubt": False},
        {**usual, "metrics": metrics, "missing": ["a.weight"]},
        {**usual, "metrics": {"two\nlines": 1.0}, "missing": []},
        {"kind": "left off", "job": 1, "ticket": 4},
        {"kind": "done"},
    ]
    one, other = Wire.pair()
    for message in sent:
        one.post(message)
        other.send(message)
    for end in (one, other):
        found = end.arrived()
        assert found == sent
        assert math.copysign(1.0, found[0]["metrics"]["loss"]) == -1.0
        end.close()
