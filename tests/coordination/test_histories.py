"""Histories by hand, in ``histories.txt``: the coordinator's answers to events, under each rule.

A line is a time, events, and all effects. ``w0 done 1.2`` is shard 2 of step 1; ``w1 left`` loses
w1's shards and results, ``w1 left-behind`` leaves the results, ``w1 crashed`` may be the shard's
fault, and after ``w1 off`` w1 has left off. ``joined=2``: w0 and w1 joined at 0; ``began=10``: each
took 1 s for a shard of step 0 too, and step 1 begins at 10. ``count`` shows position and tally.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorate.coordination import protocol
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.rules import Sync, parse
from quorate.errors import ProtocolError


def settings_of(line: str) -> tuple[Coordinator, int, float | None]:
    """Make the coordinator of a history: also how many joined, and when step 1 began."""
    rule_name, *words = line.split()
    given = dict(word.split("=") for word in words)
    rule = parse(rule_name)
    joined, began = int(given.pop("joined", 0)), given.pop("began", None)
    first, *rest = map(int, given.pop("shards", "1").split(","))
    later = rest[0] if rest else first
    first = min(joined, first) if began else first
    made = Coordinator(
        rule=rule,
        shards_of=lambda step: later if step else first,
        home_shards=(lambda rank_of, step: range(1)) if rule.by_shard else None,
        first_step=0,
        last_step=int(given.pop("steps", 9)),
        **{name: float(value) for name, value in given.items()},
    )
    return made, joined, None if began is None else float(began)


def event_of(words: str) -> protocol.Event:
    match words.split():
        case ["tick"]:
            return protocol.Tick()
        case ["stop", reason]:
            return protocol.Stop(reason)
        case ["applied", step]:
            return protocol.Applied(int(step))
        case [worker, "joined"]:
            return protocol.Joined(int(worker[1:]))
        case [worker, "left" | "left-behind" | "crashed" as how]:
            stays = how == "left-behind"
            return protocol.Left(int(worker[1:]), how, crashed=how == "crashed", results_stay=stays)
        case [worker, "done" | "failed" | "off" as how, place]:
            kind = {"done": protocol.Done, "failed": protocol.Failed, "off": protocol.Cancelled}[
                how
            ]
            return kind(int(worker[1:]), *map(int, place.split(".")))
    raise ValueError(words)


def short(reason: str) -> str:
    for text, abridged in (
        ("nobody has begun it", "free"),
        ("home shard", "home"),
        ("is slow: far behind its usual time", "is behind"),
        ("worker ", "w"),
    ):
        reason = reason.replace(text, abridged)
    return reason


def shown(effect: protocol.Effect) -> str:
    """Return an effect as the tables write it: of an update, the shards and the holders of sums."""
    match effect:
        case protocol.Wake(at):
            return f"wake {at:g}"
        case protocol.Finish(step, reason):
            return f"finish {step} ({reason})"
        case protocol.Apply(step, holders, shards, staleness):
            of = " ".join(f"w{worker}" for worker in holders)
            stale = f", {staleness} stale" if staleness else ""
            return f"apply {step} [{' '.join(map(str, shards))}] of {of}{stale}"
        case protocol.Replace(worker, reason):
            return f"replace w{worker} ({reason})"
        case protocol.Compute(worker, step, shard, reason):
            lost = "" if effect.lost_with is None else f", lost with w{effect.lost_with}"
            return f"compute w{worker} {step}.{shard} ({short(reason)}{lost})"
    name = "abort on" if isinstance(effect, protocol.Abort) else type(effect).__name__.lower()
    return f"{name} w{effect.worker} {effect.step}.{effect.shard}"


def counted(c: Coordinator, made: list[int]) -> Iterator[str]:
    yield f"applied {c.applied}, open {sorted({*range(max(made, default=-1) + 1)} - {*made})}"
    for fate, counts in c.tally.to_json().items():
        yield f"{fate} {' '.join(map(str, counts))}"


TABLE = (Path(__file__).parent / "histories.txt").read_text()
HISTORIES = {
    title: lines
    for title, *lines in (
        re.sub(r"\n +", " ", text).splitlines() for text in TABLE.strip().split("\n\n")
    )
}


@pytest.mark.parametrize("title", HISTORIES)
def test_a_history(title: str) -> None:
    c, joined, began = settings_of(title.partition(" | ")[0])
    dealt = [
        effect for worker in range(joined) for effect in c.handle(protocol.Joined(worker), 0.0)
    ]
    if began is not None:
        for task in [effect for effect in dealt if isinstance(effect, protocol.Compute)]:
            c.handle(protocol.Done(task.worker, task.step, task.shard), 1.0)
        c.handle(protocol.Applied(0), began)
    made = [] if began is None else [0]  # updates
    for line in HISTORIES[title]:
        when, _, expected = line.partition("->")
        at, words = when.strip().split(maxsplit=1)
        events = [] if words == "count" else [event_of(each) for each in words.split(" + ")]
        found = [shown(effect) for event in events for effect in c.handle(event, float(at))]
        made += [event.step for event in events if isinstance(event, protocol.Applied)]
        assert "; ".join(found or (() if events else counted(c, made))) == expected.strip(), when


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (protocol.Joined(0), "worker 0 joined twice"),
        (protocol.Left(5, "killed"), "worker 5 left and had not joined"),
        (protocol.Done(0, 0, 1), "worker 0 was not computing step 0, shard 1"),
        (protocol.Done(0, 1, 0), "worker 0 was not computing step 1, shard 0"),
        (protocol.Done(5, 0, 0), "worker 5 was not computing step 0, shard 0"),
        (protocol.Failed(1, 0, 0), "worker 1 was not computing step 0, shard 0"),
        (protocol.Cancelled(0, 0, 0), "worker 0 left off what it was not told to"),
        (protocol.Applied(0), "no update of step 0 was asked for"),
    ],
    ids=str,
)
def test_an_impossible_event_is_refused_with_the_events_before_it(
    event: protocol.Event, message: str
) -> None:
    c = Coordinator(shards_of=lambda step: 2, first_step=0, last_step=1, rule=Sync())
    c.handle(protocol.Joined(0), 0.0)
    c.handle(protocol.Joined(1), 0.0)
    with pytest.raises(ProtocolError) as caught:
        c.handle(event, 1.0)
    assert str(caught.value).splitlines() == [
        f"{message} (after 0 updates, computing)",
        "last events, oldest first:",
        "  Joined(worker=0)",
        "  Joined(worker=1)",
        f"  {event}",
    ]
