"""Towers: threads compute like the driving thread, end on request, and report their phase."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small
from support.digests import digest_of
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate


def trainer_on(loss: Callable[..., Any], workers: int = 1, **options: Any) -> quorate.Trainer:
    keywords: dict[str, Any] = {"batch_size": 12, "shards": 4, "devices": "cpu", **options}
    return quorate.Trainer(
        keywords.pop("model", small.Small),
        loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.001),
        workers=quorate.Workers(workers, engine="towers"),
        **keywords,
    )


# --- one tower computes in the driving thread -----------------------------------------------------

AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
}


def digest(workers: int, around: AbstractContextManager[object]) -> str:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return small.loss(model, batch) + 0 * torch.zeros(1).sum()  # on no device by name

    trainer = trainer_on(loss, workers)
    updates = trainer.updates(small.DATA, steps=4)
    next(updates)  # the model is made under the script's settings
    with around:
        list(updates)
    return digest_of(trainer)


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_the_loop_reaches_no_shard(name: str) -> None:
    assert digest(1, AROUND[name]()) == digest(1, nullcontext()) == digest(2, nullcontext())
    assert torch.is_grad_enabled()
    assert torch.get_default_device() == torch.device("cpu")


def test_an_interrupt_in_a_shard_is_no_error_of_the_shard_and_an_end_is_one() -> None:
    def ends_in(raised: type[BaseException]) -> quorate.Trainer:
        def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
            if trainer.global_step == 2:
                raise raised
            return small.loss(model, batch)

        trainer = trainer_on(loss)
        with expect_error(quorate.QuorateError) if raised is SystemExit else pytest.raises(raised):
            list(trainer.updates(small.DATA, steps=20))
        return trainer

    assert ends_in(KeyboardInterrupt).global_step == ends_in(SystemExit).global_step == 2


# --- several ones ---------------------------------------------------------------------------------

BATCH, STEPS, HELD = 8, 40, 20


def is_first(file: Path) -> bool:
    """Return whether this call is the first, by a file: a variable would make towers take turns."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def require_training_goes_on(hold: Callable[[], object], folder: Path) -> None:
    """Train on two towers; one is held in a shard, and the second tower computes the same shard."""

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if int(batch[0].min()) // BATCH == HELD and is_first(folder / "held"):
            hold()
        elif (folder / "held").exists():
            time.sleep(0.005)  # the held tower has begun to wait before training ends
        found: torch.Tensor = model(batch[0]).square().mean()
        return found

    linear = {"model": lambda: nn.Linear(1, 1), "batch_size": BATCH, "shards": 2}
    rows = TensorDataset(torch.arange(float(BATCH * STEPS))[:, None])
    assert len([*trainer_on(loss, 2, **linear).updates(rows, shuffle=False)]) == STEPS
    assert (folder / "held").exists()


def test_one_that_user_code_holds_is_interrupted_or_named_and_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loop() -> None:
        while True:
            time.sleep(0.01)

    (tmp_path / "loop").mkdir()
    require_training_goes_on(loop, tmp_path / "loop")
    assert not any("did not stop" in line for line in caplog.messages)
    gate = threading.Event()
    require_training_goes_on(lambda: gate.wait(60), tmp_path)
    gate.set()  # the tower ends by itself
    (line,) = (line for line in caplog.messages if "did not stop" in line)
    assert "test_towers.py, line " in line
    assert line.split(";")[0].endswith("in <lambda>")
    assert not any("one at a time" in line for line in caplog.messages)
