"""The contract of engines: kept by all present engines; broken clauses are found out."""

import sys
from typing import Any

import pytest
from support import small
from support.digests import digest_of
from support.runs import SCRIPTS, command, last_json, run

from quorate.coordination.protocol import Compute, Discard, Joined, Keep
from quorate.testing import ContractError, InMemory, checking_transport, in_memory

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


@pytest.mark.parametrize(
    ("workers", "options"),
    [(1, {}), (2, {"update": "async"}), (5, {"update": "quorum:3"}), (5, {})],
    ids=str,
)
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


ENGINES = {
    "processes": command("contract.py", options=("--workers", "2", "--engine", "processes")),
    "pipes": [sys.executable, str(SCRIPTS / "contract.py"), "pipes"],  # of writing-an-engine.md
}


@pytest.mark.parametrize("engine", ["processes", pytest.param("pipes", marks=[pytest.mark.slow])])
def test_worker_processes_keep_it(engine: str) -> None:
    ended = run(ENGINES[engine])
    assert ended.code == 0, ended.said
    runs = [RUNS] if engine == "processes" else []
    clauses = [*CLAUSES[:5], *runs, *CLAUSES[5:], FAILED, KILLED, REPLACED]
    assert last_json(ended.out) == clauses


# --- engines that break the contract --------------------------------------------------------------


class Broken:
    """A channel with a mistake, before another channel."""

    def __init__(self, inner: Any, mistake: str) -> None:
        self._inner, self._mistake = inner, mistake

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, effect: Any) -> None:
        if self._mistake == "discards nothing" and isinstance(effect, Discard):
            effect = Keep(effect.worker, effect.step, effect.shard)
        if self._mistake == "another shard" and isinstance(effect, Compute) and effect.shard == 1:
            effect = Compute(effect.worker, effect.step, 2, "")
        self._inner.send(effect)

    def receive(self, timeout_s: float | None) -> Any:
        event = self._inner.receive(timeout_s)
        if self._mistake == "joins twice" and isinstance(event, Joined):
            self._inner.post(event)
        return event

    def now(self) -> float:
        return 0.0 if self._mistake == "stands still" else self._inner.now()

    def collect(self, step: int, holders: Any) -> Any:
        parts = self._inner.collect(step, holders)
        if self._mistake == "loses a part":
            return parts[1:]
        if self._mistake == "goes wrong":
            for _, value in parts:
                value.weight += 1e-9 * len(holders)
        return parts


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
    opened = InMemory.open
    monkeypatch.setattr(InMemory, "open", lambda self, job: Broken(opened(self, job), mistake))
    expected = pytest.raises((ContractError, KeyError), match=message)
    with in_memory(), checking_transport(limit_s=1.0), expected:
        train(2)
