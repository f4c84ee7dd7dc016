"""The shard that a worker begins before it is asked for: adopted, or left off unheard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quorate.coordination.plan import Plan
from quorate.replica.flat import Layout
from quorate.replica.model import bind, trainable
from quorate.transports.processes.arena import Arena
from quorate.transports.ray.guess import Guess, guessed, likely_next
from quorate.transports.ray.relayed import arena_like, described, packed, unpacked


def order(ticket: int, shard: int, **others: Any) -> dict[str, Any]:
    return {
        "kind": "compute",
        "job": 1,
        "ticket": ticket,
        "step": 0,
        "shard": shard,
        "slot": 5,
        "snapshot": None,
        "rank_of": [0, 2],
        "images": [],
        "next": [0, shard + 1],
        **others,
    }


def test_the_rest_of_the_home_run_is_likely() -> None:
    plan = Plan(rows=40, batch_size=16, shards=4, seed=0, shuffle=False)
    steps = range(3)
    assert likely_next(plan, steps, (0, 2), (0, 0), goes_on=False) == [0, 1]
    assert likely_next(plan, steps, (0, 2), (0, 1), goes_on=False) is None
    assert likely_next(plan, steps, (1, 2), (0, 2), goes_on=False) == [0, 3]
    # An evaluation goes on with the next step, up to the last one.
    assert likely_next(plan, steps, (1, 2), (0, 3), goes_on=True) == [1, 2]
    assert likely_next(plan, steps, (1, 2), (2, 3), goes_on=True) is None
    # More workers than shards.
    assert likely_next(plan, steps, (4, 5), (0, 3), goes_on=True) is None


def test_a_guess_is_of_the_same_values() -> None:
    assert guessed(order(7, 0, next=None)) is None
    made = guessed(order(7, 0, amendments={}, shared={}))
    assert made is not None
    guess = Guess(made, 1)
    assert guess.ticket < -1
    assert not made.keys() & {"amendments", "shared"}
    assert guess.is_for(order(8, 1))
    for other in ({"shard": 2}, {"step": 1}, {"job": 2}, {"rank_of": [0, 1]}, {"kind": "open"}):
        assert not guess.is_for({**order(8, 1), **other})
    assert not guess.is_for(order(8, 1, images=["parameters", "buffers"]))
    assert not guess.is_for(order(8, 1, amendments={}))
    assert not guess.is_for(order(8, 1, shared={}))


class FakeProcess:
    """A worker that says what the test has it say."""

    is_cut = False

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.says: list[dict[str, Any]] = []

    def flush(self) -> None:
        """Do nothing."""

    def post(self, message: dict[str, Any], *fds: int) -> None:
        self.posted.append(message)

    def arrived(self) -> list[dict[str, Any]]:
        says, self.says = self.says, []
        return says


class Played:
    """An agent without Ray, and its worker."""

    def __init__(self) -> None:
        pytest.importorskip("ray", reason="quorate's extra ray is not installed")
        from quorate.transports.ray.agent import Agent

        model = nn.Linear(2, 1)
        parameters = Layout(trainable(model).items()).shared()
        bind(trainable(model), parameters)
        sizes: Any = {"mutable_frozen": (), "results": 4, "on_snapshots": False, "workers": 2}
        self.arena: Any = arena_like(described(Arena.create(model, parameters, None, **sizes)))
        self.agent: Any = Agent(0)
        self.agent._arena = self.arena
        self.worker = FakeProcess()
        self.told = 0

    def orders(self, *orders: dict[str, Any]) -> list[tuple[dict[str, Any], Any]]:
        for each in orders:
            self.agent.tell(self.told, packed(each))
            self.told += 1
        return self.round()

    def answers(self, kind: str, value: float = 0.0) -> list[tuple[dict[str, Any], Any]]:
        """Have the worker answer what it was given last."""
        given = self.worker.posted[-1]
        if given["slot"] is not None:
            self.arena.slot(given["slot"]).flat.vectors[0].fill_(value)
        self.worker.says = [{"kind": kind, "job": 1, "ticket": given["ticket"]}]
        return self.round()

    def round(self) -> list[tuple[dict[str, Any], Any]]:
        news = []
        all_news = self.agent._round(self.worker)
        for text in all_news:
            told, result = unpacked(text), None
            if told["has_image"]:
                image = bytearray(next(all_news))
                result = torch.frombuffer(image, dtype=torch.float32)[0].item()
            if told["message"] is not None:
                news.append((told["message"], result))
        return news

    def close(self) -> None:
        self.agent._alarm.close()
        self.agent._selector.close()
        self.agent = self.arena = None  # pytest keeps this object for a while


@pytest.fixture
def played() -> Any:
    made = Played()
    yield made
    made.close()


def test_a_guess_that_comes_true_is_under_way_when_it_is_ordered(played: Played) -> None:
    assert played.orders(order(1, 0)) == []
    ((done, value),) = played.answers("done", 10.0)
    assert (done["ticket"], value) == (1, 10.0)
    # The worker has the next one before anybody asked for it.
    assert [p["shard"] for p in played.worker.posted] == [0, 1]
    assert played.orders(order(2, 1, next=None)) == []
    assert len(played.worker.posted) == 2
    ((done, value),) = played.answers("done", 11.0)
    assert (done["ticket"], value) == (2, 11.0)
    assert len(played.worker.posted) == 2


def test_a_guess_that_is_done_when_it_is_ordered_is_answered_at_once(played: Played) -> None:
    played.orders(order(1, 0))
    played.answers("done", 10.0)
    assert played.answers("done", 11.0) == []
    ((done, value),) = played.orders(order(2, 1))
    assert (done["ticket"], value) == (2, 11.0)
    # And the one after it is begun, in the other slot.
    assert [p["shard"] for p in played.worker.posted] == [0, 1, 2]
    slots = [p["slot"] for p in played.worker.posted]
    assert slots[0] != slots[1] != slots[2]


def test_a_wrong_guess_is_left_off_and_nobody_hears_of_it(played: Played) -> None:
    for answer in ("left off", "done", "failed"):
        played.orders(order(1, 0))
        assert len(played.answers("done", 10.0)) == 1
        guess = played.worker.posted[-1]["ticket"]
        assert played.orders(order(9, 3, next=None)) == []
        assert played.worker.posted[-1]["ticket"] == guess  # the order waits for its end
        assert played.arena.is_cancelled(0, guess)
        assert played.answers(answer) == []
        assert played.worker.posted[-1]["ticket"] == 9
        ((done, value),) = played.answers("done", 13.0)
        assert (done["ticket"], value) == (9, 13.0)


def test_a_wrong_guess_that_is_done_holds_nobody_up(played: Played) -> None:
    played.orders(order(1, 0))
    played.answers("done", 10.0)
    played.answers("done", 11.0)
    played.orders({"kind": "close", "job": 1})
    assert played.worker.posted[-1] == {"kind": "close", "job": 1}


def test_a_cancellation_reaches_the_guess_that_was_ordered(played: Played) -> None:
    played.orders(order(1, 0))
    played.answers("done", 10.0)
    guess = played.worker.posted[-1]["ticket"]
    played.orders(order(2, 1, next=None), {"kind": "cancel", "ticket": 2})
    assert played.arena.is_cancelled(0, guess)
    ((left, _),) = played.answers("left off")
    assert (left["kind"], left["ticket"]) == ("left off", 2)
    # Or before the order itself: calls of another kind do not wait.
    played.orders(order(3, 0))
    played.answers("done", 10.0)
    guess = played.worker.posted[-1]["ticket"]
    played.orders({"kind": "cancel", "ticket": 4}, order(4, 1, next=None))
    assert played.arena.is_cancelled(0, guess)


def test_orders_are_carried_out_in_their_order(played: Played) -> None:
    played.agent.tell(1, packed({"kind": "close", "job": 2}))
    assert played.round() == []
    assert played.worker.posted == []
    played.agent.tell(0, packed({"kind": "close", "job": 1}))
    played.round()
    assert [p["job"] for p in played.worker.posted] == [1, 2]
