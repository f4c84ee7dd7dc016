"""Update rules in a dictated order: equal to a computation by hand, to the last digit.

Shards of one row compute ``x * a * b``, with two scalars. Workers in memory follow a script.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support import front_door
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.coordination.protocol import Done, Keep
from quorate.testing import Finishes, Leaves, LeavesOff, Move, in_memory

ROW = torch.arange(40, dtype=torch.float64)
X, WEIGHTS = 0.3 + 0.1 * ROW, 2.0 ** (ROW % 3)
DATA = TensorDataset(X, WEIGHTS, ROW)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(-0.7, dtype=torch.float64))

    def values(self) -> list[float]:
        return [self.a.item(), self.b.item()]


class Hand:
    """A and B, and SGD with momentum by hand, in floats."""

    def __init__(self) -> None:
        self.values, self._sums = [1.5, -0.7], [0.0, 0.0]

    def step(self, gradient: list[float]) -> None:
        for i, g in enumerate(gradient):
            self._sums[i] = 0.5 * self._sums[i] + g
            self.values[i] -= 0.125 * self._sums[i]


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


class Part(NamedTuple):
    """A shard of an update."""

    shard: int
    row: int
    worker: int
    read: list[float]  # a and b when the loss was computed


def agrees_with_a_hand_computation(
    parts: list[list[Part]], states: list[list[float]], reports: list[quorate.Report], shards: int
) -> list[int]:
    """Check the parameters, metrics and counts of each update; return the staleness of each."""
    hand = Hand()
    assert states[0] == hand.values
    count: dict[str, Counter[int]] = {"fresh": Counter(), "stale": Counter()}
    for n, (of_update, report) in enumerate(zip(parts, reports, strict=True)):
        gradients: tuple[dict[int, float], ...] = ({}, {})
        losses, ages, total = {}, [], 0.0
        for shard, row, worker, (a, b) in of_update:
            x, weight = X[row].item(), WEIGHTS[row].item()
            ages.append(n - states.index([a, b]))  # only the result of a single update can be read
            count["stale" if ages[-1] else "fresh"][worker] += 1
            gradients[0][shard], gradients[1][shard] = weight * b * x, weight * (x * a)
            losses[shard] = weight * (x * a * b)
            total += weight
        hand.step([tree(each, shards) / total for each in gradients])
        assert states[n + 1] == hand.values, n
        assert report.metrics["loss"] == tree(losses, shards) / total
        assert (report.global_step, report.weight) == (n + 1, total)
        assert (report.rows, report.staleness) == (len(of_update), max(ages))
        for name, expected in count.items():
            assert Counter(dict(enumerate(getattr(report, name)))) == expected, (n, name)
    return [report.staleness for report in reports]


# --- workers in memory ----------------------------------------------------------------------------


class Scenario(NamedTuple):
    """A rule, the moves of its workers, and the first updates; later updates in any order."""

    update: str
    shards: int
    workers: int
    updates: int
    moves: list[Move]
    order: list[list[int]]  # the workers of each update's shards
    staleness: Sequence[int] = ()  # of each update
    dropped_rows: int = 0  # by each update


def finish(*workers: int) -> list[Move]:
    return [Finishes(worker) for worker in workers]


OVER_COMMIT = [
    *(*finish(0, 0, 0, 1), LeavesOff(0)),  # of the copy begun by worker 0
    *(*finish(1, 1, 1, 0), LeavesOff(1)),
    *(*finish(1), Leaves(1, results_stay=True)),
]
RACE = (0, 1, 0, 2, 2, 2, 1, 0)
SCENARIOS = {
    # Worker 2 leaves off; worker 1 is the third where two are needed; worker 2 is lost.
    "quorum": Scenario(
        *("quorum:2", 3, 3, 5),
        [*finish(1, 0), LeavesOff(2), *finish(2, 0, 1), Leaves(2), *finish(0)],
        [[0, 1], [0, 2], [0, 1]],
        dropped_rows=1,
    ),
    # Worker 0 is fast for three shards; then worker 1 is fast; results of a lost worker stay.
    "over_commit": Scenario(
        *("sync", 4, 2, 4, OVER_COMMIT),
        [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]],
        staleness=[0] * 4,
    ),
    "over_quorum": Scenario(
        *("quorum:3", 5, 2, 4),
        [*finish(0, 0, 1), LeavesOff(0), *finish(0, 0, 0), LeavesOff(1)],
        [[0, 0, 1], [0, 0, 0]],
        dropped_rows=2,
    ),
    # Worker 0's second shard was begun before the first was applied.
    "race": Scenario(
        *("async", 3, 3, 12, finish(*RACE)), [[w] for w in RACE], staleness=[0, 1, 2, 3, 1, 1, 5, 5]
    ),
    # Workers 0 and 1 wait for worker 2, as otherwise the staleness would be 3.
    "bound": Scenario(
        *("bounded:2", 3, 3, 12, finish(0, 1, 0, 1, 2, 2, 1, 0)),
        [[0], [1], [2], [0], [1]],
        staleness=[0, 1, 2, 2, 2],
    ),
}


class Played:
    """The facts of a run in memory."""

    def __init__(self, scenario: Scenario) -> None:
        calls: list[tuple[int, list[float]]] = []

        def loss(model: Any, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            x, weight, row = batch
            calls.append((int(row), model.values()))
            return {"loss": (x * model.a * model.b).mean(), "weight": weight.sum()}

        trainer = front_door.trainer(
            Product(),
            loss,
            # Powers of two: their products are exact, wherever kernels round.
            optimizer=lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
            **{"batch_size": scenario.shards, "shards": scenario.shards},
            **{"devices": "cpu", "engine": "towers", "workers": scenario.workers},
            **{"update": scenario.update, "spot_check_every": 0},
        )
        self._on_snapshots = scenario.update.startswith(("async", "bounded"))
        self.states, self.reports = [trainer.model.values()], []
        with in_memory(scenario.moves) as self.happened:
            updates = trainer.updates(DATA, steps=scenario.updates, shuffle=False)
            for update in updates:
                self.states.append(trainer.model.values())
                self.reports.append(update)
        done = self.of(Done)
        of_shards = zip(done, calls[len(calls) - len(done) :], strict=True)
        read = {(d.worker, d.step, d.shard): call for d, call in of_shards}
        self.parts: list[list[Part]] = []
        kept = {(each.step, each.shard): each.worker for each in self.of(Keep)}
        for shards in self._shards_of_updates(kept):
            rows = [(s, w, *read[w, t, s]) for t, s, w in sorted(shards)]
            self.parts.append([Part(s, row, w, values) for s, w, row, values in rows])

    def _shards_of_updates(self, kept: dict[tuple[int, int], int]) -> Iterator[list[Any]]:
        """Yield (step, shard, worker) of each update."""
        if not self._on_snapshots:
            for step in range(len(self.reports)):
                yield [(t, s, w) for (t, s), w in kept.items() if t == step]
            return
        # In any order of the steps: a report counts the worker of its single shard.
        left, before = dict(kept), Counter[int]()
        for report in self.reports:
            counts = Counter(
                dict(enumerate(map(sum, zip(report.fresh, report.stale, strict=True))))
            )
            (worker,) = (counts - before).elements()
            before = counts
            step, shard = next(at for at, by in left.items() if by == worker)
            del left[step, shard]
            yield [(step, shard, worker)]

    def of(self, *kinds: type) -> list[Any]:
        return [entry for entry in self.happened if isinstance(entry, kinds)]

    @property
    def order(self) -> list[list[int]]:
        """The workers whose shards each update was made of."""
        return [sorted(part.worker for part in parts) for parts in self.parts]


@pytest.mark.parametrize("name", SCENARIOS)
def test_workers_in_memory(name: str) -> None:
    scenario = SCENARIOS[name]
    played = Played(scenario)
    staleness = agrees_with_a_hand_computation(
        played.parts, played.states, played.reports, scenario.shards
    )
    assert played.order[: len(scenario.order)] == scenario.order
    assert staleness[: len(scenario.staleness)] == [*scenario.staleness]
    assert {report.dropped_rows for report in played.reports} == {scenario.dropped_rows}
    if name in ("race", "bound"):
        assert Counter(k.step for k in played.of(Keep)) == Counter(range(scenario.updates))
        assert played.reports[-1].dropped == [0] * scenario.workers
