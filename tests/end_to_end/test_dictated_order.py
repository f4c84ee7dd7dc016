"""Update rules in a dictated order: to the last digit of a computation by hand.

``scripts/dictated.py`` says who begins and who ends when, on worker processes and on towers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.runs import command, last_json, run_all

from quorate.commands.main import main

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")


class Scenario(NamedTuple):
    """A run of ``scripts/dictated.py``: batches of V rows."""

    name: str
    update: str
    shards: int
    workers: int
    updates: int

    def words(self, optimizer: str, folder: Path, engine: str) -> list[str]:
        options = {"workers": self.workers, "shards": self.shards, "update": self.update}
        pairs = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return command(
            "dictated.py",
            *(self.name, optimizer, str(self.updates), str(self.shards), str(folder)),
            # A check would call the loss outside of the order that is dictated.
            options=(*pairs, "--engine", engine, "--spot-check-every", "0"),
        )


QUORUM = Scenario("quorum", "quorum:2", shards=3, workers=3, updates=5)
ALL_OF_FOUR = Scenario("over_commit", "quorum:4", shards=4, workers=2, updates=4)
OVER_COMMIT = Scenario("over_commit", "sync", shards=4, workers=2, updates=4)
OVER_QUORUM = Scenario("over_quorum", "quorum:3", shards=5, workers=2, updates=4)
RACE = Scenario("race", "async", shards=3, workers=3, updates=12)
BOUND = Scenario("bound", "bounded:2", shards=3, workers=3, updates=12)


class Hand:
    """A and B, and an optimizer by hand, in floats."""

    def __init__(self, optimizer: str) -> None:
        self.values = [1.5, -0.7]
        self._optimizer = optimizer
        self._first, self._second = [0.0, 0.0], [0.0, 0.0]
        self._n = 0

    def step(self, gradient: list[float]) -> None:
        self._n += 1
        for i, g in enumerate(gradient):
            if self._optimizer == "adam":
                m = self._first[i] = 0.9 * self._first[i] + 0.1 * g
                v = self._second[i] = 0.999 * self._second[i] + 0.001 * g * g
                m, v = m / (1 - 0.9**self._n), v / (1 - 0.999**self._n)
                self.values[i] -= 0.05 * m / (math.sqrt(v) + 1e-8)
            else:
                momentum = 0.5 if self._optimizer == "momentum" else 0.0
                self._first[i] = momentum * self._first[i] + g
                self.values[i] -= 0.125 * self._first[i]


def tree(values: Mapping[int, float], shards: int) -> float:
    """The sum of some of the shards, in the order of the tree over all."""
    level = [values.get(shard) for shard in range(shards)]
    while len(level) > 1:
        level += [None] * (len(level) % 2)
        level = [
            b if a is None else a if b is None else a + b
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]
    assert level[0] is not None
    return level[0]


class Given(NamedTuple):
    """A shard that a worker was given."""

    worker: int
    token: int
    step: int
    shard: int
    version: int  # updates made when it was given


class Told:
    """What a dictated run was, in order."""

    def __init__(self, found: Mapping[str, Any], shards: int) -> None:
        self.log: list[list[Any]] = found["log"]
        self.shards: dict[str, dict[str, Any]] = found["shards"]
        self.states: list[list[float]] = found["states"]
        self.reports: list[dict[str, Any]] = found["reports"]
        self._v = shards
        self.given: dict[int, Given] = {}
        self.updates: list[list[Given]] = []  # what each was made of
        self.counts: list[dict[str, Counter[int]]] = []  # shards so far, per worker, at each
        self._read_log()

    def _read_log(self) -> None:
        kept: dict[tuple[int, int], Given] = {}
        done: dict[int, Given] = {}  # by worker, the last one
        count = {name: Counter[int]() for name in ("fresh", "stale")}
        for kind, *entry in self.log:
            match kind:
                case "Compute":
                    given = Given(*entry)
                    self.given[given.token] = given
                case "Done":
                    done[entry[0]] = self.given[entry[1]]
                case "Keep":
                    kept[entry[2], entry[3]] = done[entry[0]]
                case "Applied":
                    parts = [g for _, g in sorted(kept.items()) if g.step == entry[0]]
                    for g in parts:
                        age = len(self.updates) - g.version
                        count["stale" if age else "fresh"][g.worker] += 1
                    self.updates.append(parts)
                    self.counts.append({name: Counter(c) for name, c in count.items()})

    @property
    def order(self) -> list[list[int]]:
        """The workers whose shards each update was made of."""
        return [sorted(given.worker for given in parts) for parts in self.updates]

    @property
    def staleness(self) -> list[int]:
        return [report["staleness"] for report in self.reports]

    def between(self, first: list[Any], second: list[Any]) -> list[str]:
        """The kinds of entries between two, the first of each."""
        start = self.log.index(first)
        return [entry[0] for entry in self.log[start + 1 : self.log.index(second, start)]]

    def token(self, worker: int, nth: int) -> int:
        """Of the nth shard that a worker was given."""
        return [g.token for g in self.given.values() if g.worker == worker][nth]

    def agrees_with_a_hand_computation(self, optimizer: str) -> None:
        hand, exact = Hand(optimizer), optimizer != "adam"
        rel = 0.0 if exact else 1e-13
        assert self.states[0] == hand.values
        for n, (parts, report) in enumerate(zip(self.updates, self.reports, strict=True)):
            gradients, losses = ({}, {}), {}
            total = 0.0
            for given in parts:
                x, weight, *_ = self.shards[str(given.token)]["begun"]
                a, b = self.states[given.version]
                gradients[0][given.shard] = weight * b * x
                gradients[1][given.shard] = weight * (x * a)
                losses[given.shard] = weight * (x * a * b)
                total += weight
            hand.step([tree(each, self._v) / total for each in gradients])
            assert self.states[n + 1] == pytest.approx(hand.values, rel=rel, abs=0.0), n
            assert report["metrics"]["loss"] == tree(losses, self._v) / total
            assert (report["global_step"], report["weight"]) == (n + 1, total)
            assert report["rows"] == len(parts)
            assert report["staleness"] == max(n - given.version for given in parts)
            for name in ("fresh", "stale"):
                assert Counter(dict(enumerate(report[name]))) == self.counts[n][name], (n, name)

    def was_read_whole(self, *, on_snapshots: bool) -> None:
        """What shards read is what one update left, and stays so for those that count."""
        kept = {given.token for parts in self.updates for given in parts}
        for token, shard in self.shards.items():
            given = self.given[int(token)]
            if given.token in kept or on_snapshots:
                assert shard["begun"][2:] == self.states[given.version], given
                assert shard["ended"] in (self.states[given.version], None), given

    def has_dropped(self) -> None:
        """What was told to leave off did so before its backward pass, or came too late."""
        told = [entry[1:] for entry in self.log if entry[0] == "Cancel"]
        done = {entry[2] for entry in self.log if entry[0] == "Done"}
        for _, token, *_ in told:
            if token not in done:
                began = self.shards.get(str(token))  # or it was told before it began
                assert began is None or not began["backward"], token
        applied: set[int] = set()
        for parts, report in zip(self.updates, self.reports, strict=True):
            applied |= {given.step for given in parts}
            dropped = Counter(worker for worker, _, step, _ in told if step in applied)
            assert Counter(dict(enumerate(report["dropped"]))) == dropped


def dictated(out: str, scenario: Scenario, optimizer: str) -> Told:
    """What every scenario has in common."""
    told = Told(last_json(out), scenario.shards)
    assert len(told.reports) == scenario.updates
    told.agrees_with_a_hand_computation(optimizer)
    on_snapshots = scenario.update.startswith(("async", "bounded"))
    told.was_read_whole(on_snapshots=on_snapshots)
    told.has_dropped()
    if on_snapshots:
        rows = Counter(given.step for parts in told.updates for given in parts)
        assert rows == Counter(range(scenario.updates))
        assert told.reports[-1]["dropped"] == [0] * scenario.workers
    return told


def check_quorum(told: Told, *, kills: bool) -> None:
    assert told.order[:2] == [[0, 1], [0, 2]]
    assert [report["dropped_rows"] for report in told.reports] == [1] * 5
    # 1. Worker 2 was told after the update; it left off, and began the next step.
    late = told.token(2, 0)
    assert ["Cancelled", 2, late] in told.log
    assert told.given[told.token(2, 1)].step == 1
    # 2. Worker 1 was the third where two were needed.
    third = told.token(1, 1)
    assert told.between(["Done", 1, third], ["Discard", 1, None, 1, told.given[third].shard]) == []
    assert told.shards[str(third)]["backward"]
    assert told.reports[1]["dropped"][:3] == [0, 1, 1]
    # 3. A shard of the killed one, and no more than the two that were needed beside it.
    if kills:
        killed = next(entry[2] for entry in told.log if entry[0] == "Left")
        assert told.given[killed].step == 2
        begun = [given for given in told.given.values() if given.step == 2]
        assert len(begun) == 3
        assert told.order[2] == [0, 1]
        assert told.reports[2]["dropped"][:3] == [0, 1, 1]
        assert {given.token for given in begun} == {killed, *(g.token for g in told.updates[2])}


def check_over_commit(told: Told, *, kills: bool) -> None:
    assert told.order[:2] == [[0, 0, 0, 1], [0, 1, 1, 1]]
    assert told.staleness == [0] * 4
    assert told.reports[-1]["dropped"] == [0, 0]
    begun = [given for given in told.given.values() if given.step == 2]
    if kills:  # it had computed one, which stays, and was at another
        assert told.order[2] == [0, 0, 0, 1]
        assert len(begun) == 5
    else:
        assert len(begun) == 4


def check_over_quorum(told: Told, *, kills: bool) -> None:
    assert told.order[:2] == [[0, 0, 1], [0, 0, 0]]
    assert [report["dropped_rows"] for report in told.reports] == [2] * 4
    assert ["Cancelled", 1, told.token(1, 1)] in told.log


def check_race(told: Told, *, kills: bool) -> None:
    # Worker 0's second shard was begun before its first was applied.
    assert told.order[:8] == [[0], [1], [0], [2], [2], [2], [1], [0]]
    assert told.staleness[:8] == [0, 1, 2, 3, 1, 1, 5, 5]


def check_bound(told: Told, *, kills: bool) -> None:
    assert told.order[:5] == [[0], [1], [2], [0], [1]]
    assert told.staleness[:5] == [0, 1, 2, 2, 2]
    assert max(told.staleness) == 2
    # From the moment that worker 0 is done until worker 2 is, nothing is applied or given; then
    # all three go on before the coordinator listens to anyone.
    late = told.token(2, 0)
    waits = told.between(["Done", 0, told.token(0, 1)], ["Done", 2, late])
    assert waits == ["Keep", "Done", "Keep"]
    start = told.log.index(["Done", 2, late])
    kinds = [entry[0] for entry in told.log[start + 1 :]]
    assert kinds[:7] == ["Keep", *["Applied", "Compute"] * 3]


CHECKS = {
    QUORUM: check_quorum,
    ALL_OF_FOUR: check_over_commit,
    OVER_COMMIT: check_over_commit,
    OVER_QUORUM: check_over_quorum,
    RACE: check_race,
    BOUND: check_bound,
}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("scenario", CHECKS, ids=lambda s: f"{s.name}-{s.update}")
def test_towers_in_a_dictated_order_agree_with_a_hand_computation(
    scenario: Scenario, optimizer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(scenario.words(optimizer, tmp_path / "gates", "towers")[3:]) == 0
    told = dictated(capfd.readouterr().out, scenario, optimizer)
    CHECKS[scenario](told, kills=False)


@pytest.mark.slow
def test_processes_in_a_dictated_order_agree_with_a_hand_computation(tmp_path: Path) -> None:
    optimizers = {QUORUM: "momentum", ALL_OF_FOUR: "sgd", RACE: "momentum", BOUND: "adam"}
    ended = run_all(
        {
            scenario.name: scenario.words(optimizer, tmp_path / scenario.name, "processes")
            for scenario, optimizer in optimizers.items()
        }
    )
    for scenario, optimizer in optimizers.items():
        assert ended[scenario.name].code == 0, ended[scenario.name].said
        told = dictated(ended[scenario.name].out, scenario, optimizer)
        CHECKS[scenario](told, kills=True)
