"""The contract of transports: kept by those that there are; what breaks a clause is found out."""

from __future__ import annotations

from typing import Any

import pytest
from support import small
from support.digests import digest_of
from support.runs import command, last_json, run

from quorate.coordination.protocol import Cancelled, Compute, Discard, Event, Joined, Keep
from quorate.replica.shard_sum import Part
from quorate.testing import ContractError, checking_transport, in_memory
from quorate.training.observer import observing
from quorate.transports.wrapped import WrappedChannel, WrappedTransport

CLAUSES = [
    "every worker joins once, and nothing happens by itself",
    "any thread may ask for the status, a row for each worker",
    "a shard has the same bits on every worker",
    "a sum has the same bits, whoever computes which shard",
    "parts are collected from those alone who hold some",
    "what is discarded is in no sum, and may be computed again",
    "what is collected is valid until publish",
    "what is sent after publish is computed from the parameters as they are then",
    "who is told to leave off does, or is done, and goes on",
    "who was told too late to leave off goes on all the same",
    "any thread may post an event, which ends a wait",
    "receive returns when its time is over, by now()",
    "a job that is closed while shards are computed leaves nothing behind",
]
RUNS = "shards dealt in one run have the bits of single ones"
FAILED = "what user code raises is kept, and its worker goes on"
KILLED = "who is killed leaves once, and is back"
REPLACED = "who is replaced leaves once, and is back"


def train(workers: int, steps: int = 2, **options: Any) -> str:
    trainer = small.trainer(None, workers, engine="towers", **options)
    for _ in trainer.updates(small.DATA, steps=steps):
        pass
    return digest_of(trainer)


@pytest.mark.parametrize("options", [{}, {"update": "quorum:3"}, {"update": "async"}], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_towers_keep_it_and_nobody_notices(workers: int, options: dict[str, Any]) -> None:
    with checking_transport() as clauses:
        checked = train(workers, **options)
    assert clauses == [*CLAUSES[:5], RUNS, *CLAUSES[5:]]
    if not options:
        assert checked == train(1)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_in_memory_keep_it(workers: int) -> None:
    with in_memory(), checking_transport() as clauses:
        checked = train(workers)
    assert clauses == [*CLAUSES, REPLACED]
    assert checked == train(1)


def test_worker_processes_keep_it() -> None:
    ended = run(command("contract.py", options=("--workers", "2", "--engine", "processes")))
    assert ended.code == 0, ended.said
    clauses = [*CLAUSES[:5], RUNS, *CLAUSES[5:], FAILED, KILLED, REPLACED]
    assert last_json(ended.out) == clauses


def test_a_job_must_be_large_enough() -> None:
    with (
        checking_transport(),
        pytest.raises(ValueError, match="a job of 1 steps, expected at least 2"),
    ):
        train(1, steps=1)


# --- transports that break it ---------------------------------------------------------------------


class Broken(WrappedChannel):
    """A channel with one mistake."""

    mistake = ""

    def send(self, effect: Any) -> None:
        if self.mistake == "discards nothing" and isinstance(effect, Discard):
            effect = Keep(effect.worker, effect.step, effect.shard)
        if self.mistake == "another shard" and isinstance(effect, Compute) and effect.shard == 1:
            self.wrong = effect
            effect = Compute(effect.worker, effect.step, 2, "")
        super().send(effect)

    def receive(self, timeout_s: float | None) -> Event | None:
        event = super().receive(timeout_s)
        if self.mistake == "joins twice" and isinstance(event, Joined):
            self.post(event)
        if self.mistake == "is too quick" and event is None:
            return super().receive(0.0)
        return event

    def now(self) -> float:
        return 0.0 if self.mistake == "stands still" else super().now()

    def collect(self, step: int, holders: Any) -> list[Part]:
        parts = super().collect(step, holders)
        if self.mistake == "loses a part":
            return parts[1:]
        if self.mistake == "goes wrong":
            for _, value in parts:
                value.weight += 1e-9 * len(holders)
        return parts

    def publish(self) -> None:
        if self.mistake != "publishes nothing":
            super().publish()


def told_at_any_time(channel: Broken, effect: Any) -> None:
    channel.post(Cancelled(effect.worker, effect.step, effect.shard))


class Around(WrappedTransport):
    def open(self, job: Any) -> Broken:
        return Broken(super().open(job))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("joins twice", "every worker joins once.*: got Joined"),
        ("another shard", "same bits on every worker: got Done"),
        ("loses a part", "got parts of another step or of no tree"),
        (
            "goes wrong",
            "whoever computes which shard: the sum of step 0 on workers .0, 1. has other",
        ),
        ("stands still", "by now.*: got 0 s"),
        ("discards nothing", "what is discarded is in no sum"),
    ],
)
def test_a_mistake_is_found_by_its_clause(
    mistake: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "mistake", mistake)
    with in_memory(), observing(lambda transport, *_: Around(transport)):  # noqa: SIM117
        with (
            checking_transport(limit_s=1.0),
            pytest.raises((ContractError, KeyError), match=message),
        ):
            train(2)
