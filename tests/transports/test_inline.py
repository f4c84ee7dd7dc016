"""One worker computes in the thread that drives: as another thread would, and Ctrl-C ends it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from support.messages import expect_error
from support.small import DATA, Small, loss

import quorate
from quorate.machine.left import LeftError
from quorate.replica.digest import digest as state_digest

Loss = Callable[[torch.nn.Module, list[torch.Tensor]], torch.Tensor]

AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
}


def trainer(function: Loss, workers: int = 1) -> quorate.Trainer:
    return quorate.Trainer(
        Small,
        function,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        batch_size=12,
        shards=4,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
    )


def digest(workers: int, around: Callable[[], AbstractContextManager[object]] | None) -> str:
    def made(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return loss(model, batch) + 0 * torch.zeros(1).sum()  # on no device by name

    run = trainer(made, workers)
    updates = run.updates(DATA, steps=4)
    next(updates)  # the model is made as the script has it
    if around is None:
        list(updates)
    else:
        with around():
            list(updates)
    return state_digest(run.model.state_dict().items())


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_the_loop_reaches_no_shard(name: str) -> None:
    assert digest(1, AROUND[name]) == digest(1, None) == digest(2, None)
    assert torch.is_grad_enabled()
    assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize("error", [KeyboardInterrupt, LeftError], ids=lambda e: e.__name__)
def test_a_signal_in_a_shard_is_no_error_of_the_shard(error: type[BaseException]) -> None:
    calls = 0

    def interrupted(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 40:  # as if it came just now
            raise error
        return loss(model, batch)

    run = trainer(interrupted)
    with pytest.raises(error):
        for _ in run.updates(DATA, steps=20):
            pass
    assert calls == 40
    assert 0 < run.global_step < 20


def test_an_end_that_the_script_asks_for_is_one() -> None:
    def leaves(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if run.global_step == 2:
            raise SystemExit(3)
        return loss(model, batch)

    run = trainer(leaves)
    with expect_error(quorate.QuorateError):
        for _ in run.updates(DATA, steps=20):
            pass
