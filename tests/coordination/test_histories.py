"""Histories by hand: the coordinator's answers to events, under each rule.

A line is a time, events, and all effects. ``w0 done 1.2`` is shard 2 of step 1; ``w1 left`` loses
w1's shards and results, ``w1 left-behind`` leaves the results, ``w1 crashed`` may be the shard's
fault, and after ``w1 off`` w1 has left off. ``joined=2``: w0 and w1 joined at 0; ``began=10``: each
took 1 s for a shard of step 0 too, and step 1 begins at 10. ``count`` shows position and tally.
"""

import re
from collections.abc import Iterator

import pytest

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancelled,
    Compute,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Joined,
    Left,
    Replace,
    Stop,
    Tick,
    Wake,
)
from quorate.coordination.rules import Sync, parse
from quorate.errors import ProtocolError

SYNC = """
sync shards=3 steps=2 | each computes one, and homes move with each who joins
0     w0 joined              -> compute w0 0.0 (home)
0     w1 joined              -> compute w1 0.2 (home)
0     w2 joined              -> compute w2 0.1 (free)
1     w1 done 0.2            -> keep w1 0.2; wake 1.5
1.25  w0 done 0.0            -> keep w0 0.0; wake 1.6875
1.5   w2 done 0.1            -> keep w2 0.1; apply 0 [0 1 2] of w0 w1 w2
2     applied 0              -> compute w0 1.0 (home); compute w1 1.1 (home); compute w2 1.2 (home)
3     w0 done 1.0 + w1 done 1.1 + w2 done 1.2 -> keep w0 1.0; wake 3.5; keep w1 1.1; wake 4.25;
                               keep w2 1.2; apply 1 [0 1 2] of w0 w1 w2
4     applied 1              -> finish 2 (all steps are done)

sync shards=6 joined=2 | the fast one does more, from the end of the other's run
1     w0 done 0.0            -> keep w0 0.0; compute w0 0.1 (home)
2     w0 done 0.1            -> keep w0 0.1; compute w0 0.2 (home)
3     w0 done 0.2            -> keep w0 0.2; compute w0 0.5 (free)
4     w0 done 0.5            -> keep w0 0.5; compute w0 0.4 (free)
4.5   w1 done 0.3            -> keep w1 0.3; wake 5.5
5     w0 done 0.4            -> keep w0 0.4; apply 0 [0 1 2 3 4 5] of w0 w1

sync shards=2 steps=4 joined=3 began=10 | another computes a straggler's shard after 1.5 usual times
11    w0 done 1.0            -> keep w0 1.0; wake 11.5
11.25 tick                   -> wake 11.5
11.5  tick                   -> compute w0 1.1 (w1 is behind)
12    tick                   ->
12.5  w0 done 1.1            -> keep w0 1.1; apply 1 [0 1] of w0
13    applied 1              -> cancel w1 1.1; compute w0 2.0 (home); compute w2 2.1 (free)
14    w0 done 2.0 + w2 done 2.1 -> keep w0 2.0; wake 14.5; keep w2 2.1; apply 2 [0 1] of w0 w2
15    applied 2              -> compute w0 3.0 (home); compute w2 3.1 (free)
15.5  w1 done 1.1            -> discard w1 1.1; wake 16.5
16    w0 done 3.0 + w2 done 3.1 -> keep w0 3.0; wake 16.5; keep w2 3.1; apply 3 [0 1] of w0 w2
17    applied 3              -> finish 4 (all steps are done)
17    count                  -> applied 4, open []; fresh 5 1 2; stale 0 0 0; dropped 0 0 0;
                               copies 0 1 0; staleness 0 0

sync shards=2 steps=3 joined=3 | of a holder that leaves in the update shards are dealt again
1     w0 done 0.0 + w1 done 0.1 -> keep w0 0.0; wake 1.5; keep w1 0.1; apply 0 [0 1] of w0 w1
1.5   w1 left                -> compute w0 0.1 (free, lost with w1); wake 3
2.5   w0 done 0.1            -> keep w0 0.1; apply 0 [0 1] of w0
3     w0 left-behind         ->
4     applied 0              -> compute w2 1.0 (home)

sync shards=3 joined=2 | a shard that failed is tried on another worker, then aborts
1     w0 failed 0.0          -> compute w0 0.1 (home)
5     w0 done 0.1            -> keep w0 0.1; wake 6
5.5   w1 done 0.2            -> keep w1 0.2; compute w1 0.0 (free); wake 13.75
6     w1 failed 0.0          -> abort on w1 0.0
7     w0 left                ->

sync shards=1 timeout_s=10 | who is silent for too long is replaced once, on a tick
1     w0 joined              -> compute w0 0.0 (home); wake 11
10.5  tick                   -> wake 11
11    w1 joined              -> wake 11
11    tick                   -> replace w0 (no answer for 10 s)
99    tick                   ->
99    w0 crashed             -> compute w1 0.0 (home, lost with w0); wake 109
100   w0 joined              -> wake 109

sync shards=2 steps=9 joined=3 began=10 | a stop ends the run after the step, for good
11.5  w0 done 1.0            -> keep w0 1.0; compute w0 1.1 (w1 is behind)
11.5  stop first             ->
11.5  stop second            ->
12.5  w0 done 1.1            -> keep w0 1.1; apply 1 [0 1] of w0
13    applied 1              -> cancel w1 1.1; finish 2 (first)
14    w1 done 1.1            -> discard w1 1.1
15    w1 left                ->
15    w1 joined              ->
15    stop again             ->
15    tick                   ->
"""

QUORUM = """
quorum:2 shards=3 joined=3 began=10 | the late one is told to leave off, dropped, and counted once
11    w2 done 1.2            -> keep w2 1.2; wake 11.5
11.1  w0 done 1.0            -> keep w0 1.0; apply 1 [0 2] of w0 w2
12    applied 1              -> cancel w1 1.1; compute w0 2.0 (home); compute w2 2.2 (home)
12    count                  -> applied 2, open []; fresh 2 1 1; stale 0 0 0; dropped 0 1 1;
                               copies 0 0 0; staleness 0 0
12.5  w1 done 1.1            -> discard w1 1.1; compute w1 2.1 (home)
12.5  count                  -> applied 2, open []; fresh 2 1 1; stale 0 0 0; dropped 0 1 1;
                               copies 0 0 0; staleness 0 0
"""

ASYNC = """
async joined=2 | who pushes goes on before its update is made
1     w0 done 0.0            -> keep w0 0.0; compute w0 2.0 (home); apply 0 [0] of w0
1     applied 0              ->
1.5   w1 done 1.0            -> keep w1 1.0; compute w1 3.0 (home); apply 1 [0] of w1, 1 stale
1.5   applied 1              ->
2     w0 done 2.0            -> keep w0 2.0; compute w0 4.0 (home); apply 2 [0] of w0, 2 stale
2     applied 2              ->
2     count                  -> applied 3, open []; fresh 1 0; stale 1 1; dropped 0 0; copies 0 0;
                               staleness 3 2

async joined=3 | what a dead worker computed is next, and computed afresh
1     w0 done 0.0            -> keep w0 0.0; compute w0 3.0 (home); apply 0 [0] of w0
1     applied 0              ->
1.5   w1 left                ->
2     w2 done 2.0            -> keep w2 2.0; compute w2 1.0 (home, lost with w1);
                               apply 2 [0] of w2, 1 stale
2     applied 2              ->
2     count                  -> applied 2, open [1]; fresh 1 0 0; stale 0 0 1; dropped 0 0 0;
                               copies 0 0 0; staleness 1 1
3     w2 done 1.0            -> keep w2 1.0; compute w2 4.0 (home); apply 1 [0] of w2, 1 stale

async joined=3 | a stop finishes what is under way; what nobody has is left open
1     w2 done 2.0            -> keep w2 2.0; compute w2 3.0 (home); apply 2 [0] of w2
1     applied 2              ->
1     w1 left                ->
1.5   stop SIGTERM           ->
2     w0 done 0.0            -> keep w0 0.0; apply 0 [0] of w0, 1 stale; wake 2.5
2     applied 0              -> wake 2.5
2     w2 done 3.0            -> keep w2 3.0; apply 3 [0] of w2, 2 stale
2     applied 3              -> finish 3 (SIGTERM)
2     count                  -> applied 3, open [1]; fresh 0 0 1; stale 1 0 1; dropped 0 0 0;
                               copies 0 0 0; staleness 3 2
"""

BOUNDED = """
bounded:2 joined=2 | whoever would be too far ahead waits
1     w0 done 0.0            -> keep w0 0.0; compute w0 2.0 (home); apply 0 [0] of w0
1     applied 0              ->
2     w0 done 2.0            -> keep w0 2.0; compute w0 3.0 (home); apply 2 [0] of w0, 1 stale
2     applied 2              ->
3     w0 done 3.0            -> keep w0 3.0; compute w0 4.0 (home)
4     w0 done 4.0            -> keep w0 4.0
99    w1 done 1.0            -> keep w1 1.0; apply 1 [0] of w1, 2 stale
99    applied 1              -> compute w0 5.0 (home); apply 3 [0] of w0, 2 stale
99    applied 3              -> compute w1 6.0 (home); apply 4 [0] of w0, 2 stale
99    applied 4              ->

bounded:1 joined=2 | nothing is copied, and a dead worker holds nobody up
1     w0 done 0.0            -> keep w0 0.0; apply 0 [0] of w0
1     applied 0              -> compute w0 2.0 (home)
2     w0 done 2.0            -> keep w0 2.0
50    w1 left                -> compute w0 1.0 (home, lost with w1); apply 2 [0] of w0
50    applied 2              ->
51    w0 done 1.0            -> keep w0 1.0; apply 1 [0] of w0, 1 stale
"""


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


def event_of(words: str) -> Event:
    match words.split():
        case ["tick"]:
            return Tick()
        case ["stop", reason]:
            return Stop(reason)
        case ["applied", step]:
            return Applied(int(step))
        case [worker, "joined"]:
            return Joined(int(worker[1:]))
        case [worker, "left" | "left-behind" | "crashed" as how]:
            stays = how == "left-behind"
            return Left(int(worker[1:]), how, crashed=how == "crashed", results_stay=stays)
        case [worker, "done" | "failed" | "off" as how, place]:
            kind = {"done": Done, "failed": Failed, "off": Cancelled}[how]
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


def shown(effect: Effect) -> str:
    """Return an effect as the tables write it: of an update, the shards and the holders of sums."""
    match effect:
        case Wake(at):
            return f"wake {at:g}"
        case Finish(step, reason):
            return f"finish {step} ({reason})"
        case Apply(step, holders, shards, staleness):
            of = " ".join(f"w{worker}" for worker in holders)
            stale = f", {staleness} stale" if staleness else ""
            return f"apply {step} [{' '.join(map(str, shards))}] of {of}{stale}"
        case Replace(worker, reason):
            return f"replace w{worker} ({reason})"
        case Compute(worker, step, shard, reason):
            lost = "" if effect.lost_with is None else f", lost with w{effect.lost_with}"
            return f"compute w{worker} {step}.{shard} ({short(reason)}{lost})"
    name = "abort on" if isinstance(effect, Abort) else type(effect).__name__.lower()
    return f"{name} w{effect.worker} {effect.step}.{effect.shard}"


def counted(c: Coordinator) -> Iterator[str]:
    yield f"applied {c.applied}, open {c.left_open}"
    for fate, counts in c.tally.to_json().items():
        yield f"{fate} {' '.join(map(str, counts))}"


HISTORIES = {
    title: lines
    for table in (SYNC, QUORUM, ASYNC, BOUNDED)
    for title, *lines in (
        re.sub(r"\n +", " ", text).splitlines() for text in table.strip().split("\n\n")
    )
}


@pytest.mark.parametrize("title", HISTORIES)
def test_a_history(title: str) -> None:
    c, joined, began = settings_of(title.partition(" | ")[0])
    dealt = [effect for worker in range(joined) for effect in c.handle(Joined(worker), 0.0)]
    if began is not None:
        for task in [effect for effect in dealt if isinstance(effect, Compute)]:
            c.handle(Done(task.worker, task.step, task.shard), 1.0)
        c.handle(Applied(0), began)
    for line in HISTORIES[title]:
        when, _, expected = line.partition("->")
        at, words = when.strip().split(maxsplit=1)
        events = [] if words == "count" else [event_of(each) for each in words.split(" + ")]
        found = [shown(effect) for event in events for effect in c.handle(event, float(at))]
        assert "; ".join(found or (counted(c) if not events else ())) == expected.strip(), when


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
    c = Coordinator(shards_of=lambda step: 2, first_step=0, last_step=1, rule=Sync())
    c.handle(Joined(0), 0.0)
    c.handle(Joined(1), 0.0)
    with pytest.raises(ProtocolError) as caught:
        c.handle(event, 1.0)
    assert str(caught.value).splitlines() == [
        f"{message} (after 0 updates, computing)",
        "last events, oldest first:",
        "  Joined(worker=0)",
        "  Joined(worker=1)",
        f"  {event}",
    ]
