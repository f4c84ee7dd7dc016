"""A replica in stages: the bits of one in one piece, and one line for what cannot be."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import active_children, current_process
from pathlib import Path
from threading import current_thread
from typing import Any

import psutil
import pytest
import torch
from support.digests import digest_of
from support.everything import EVERYTHING
from support.messages import expect_error
from support.references import References
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import ExitError, QuorateError, SettingError, UserError
from quorate.transports.stages.pipelined import Pipelined

UPDATES = 3


def made(
    *split: str,
    devices: str = "cpu+cpu",
    model: Callable[[], nn.Module] = EVERYTHING.Everything,
    loss: Any = EVERYTHING.loss,
    **options: Any,
) -> quorate.Trainer:
    torch.manual_seed(3)
    compute = {name: options.pop(name) for name in ("pipeline", "compile") if name in options}
    defaults = {"batch_size": 24, "shards": 4, "workers": quorate.Workers(1, engine="towers")}
    return quorate.Trainer(
        model(),
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.Adam(params, lr=3e-3), clip_norm=1.0, ema_decay=0.99
        ),
        devices=devices,
        compute=quorate.Compute(split=list(split) or None, **compute),
        **defaults | options,
    )


def trained(*split: str, updates: int = UPDATES, **options: Any) -> str:
    trainer = made(*split, **options)
    for _ in islice(trainer.updates(EVERYTHING.Sentences(110), epochs=1), updates):
        pass
    return digest_of(trainer)


@pytest.fixture
def unsplit(references: References) -> str:
    digest: str = references.once(lambda: trained(devices="cpu"), "unsplit", UPDATES)
    return digest


@pytest.mark.parametrize(
    ("split", "devices", "pipeline"),
    [
        (("embedding",), "cpu+cpu", "1f1b"),
        pytest.param(("lstm",), "cpu+cpu", "gpipe", marks=pytest.mark.slow),
        pytest.param(("embedding", "dropout"), "cpu+cpu+cpu", "1f1b", marks=pytest.mark.slow),
        pytest.param(
            ("norm", "embedding", "dropout"), "cpu+cpu", "interleaved", marks=pytest.mark.slow
        ),
        pytest.param(
            ("embedding", "dropout"), "cpu+cpu+cpu", "zero-bubble", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.usefixtures("way")
def test_the_bits_of_a_model_in_one_piece(
    unsplit: str, split: tuple[str, ...], devices: str, pipeline: str
) -> None:
    assert trained(*split, devices=devices, pipeline=pipeline) == unsplit
    assert not [p for p in active_children() if p.name.startswith("quorate-stage")]


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("split", "pipeline"), [((), "interleaved"), (("lstm",), "zero-bubble")])
def test_lower_precision_and_a_cut_of_its_own(split: tuple[str, ...], pipeline: str) -> None:
    in_stages = trained(*split, pipeline=pipeline, precision="bf16")
    assert in_stages == trained(devices="cpu", precision="bf16")


def test_a_model_that_is_cut_by_itself(unsplit: str, caplog: pytest.LogCaptureFixture) -> None:
    assert trained() == unsplit
    (line,) = [line for line in caplog.messages if "stages" in line]
    assert re.fullmatch(
        r"stages: the model is cut before \S+: \d+% \+ \d+% of a shard's time, "
        r"\S+ \w+ \+ \S+ \w+ of parameters; \S+ \w+ of activations per shard between stages",
        line,
    ), line


class Tied(nn.Module):
    """A weight at both ends, a value over two cuts, dicts and None between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = Reads()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.embedding(tokens).mean(1)
        values = {"first": self.first(words), "words": words, "none": None}
        values["first"] = self.norm(values["first"])
        between = self.second(values)
        between = self.frozen(between).relu_() + words * between
        logits: torch.Tensor = self.head(between)
        return logits


class Reads(nn.Module):
    def forward(self, values: dict[str, Any]) -> torch.Tensor:
        assert values["none"] is None
        return torch.dropout(values["first"], 0.4, self.training) + values["words"].sin()


def of_words(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    _, tokens, labels = batch
    tokens = torch.where(torch.rand(tokens.shape) < 0.1, 1, tokens)  # drawn before the model
    logits = model(tokens)
    noise = torch.rand(())  # and after it
    return {"loss": nn.functional.cross_entropy(logits, labels) * (1 + noise)}


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", "zero-bubble"])
def test_tied_parameters_and_values_over_several_cuts(pipeline: str) -> None:
    train = partial(trained, model=Tied, loss=of_words, shards=6)
    in_stages = train("norm", "frozen", devices="cpu+cpu+cpu", pipeline=pipeline)
    assert in_stages == train(devices="cpu")


def killing(phase: str, counts: list[int]) -> Callable[..., Any]:
    """A loss that ends the process of stage 1, by signal 9, as often as the pipe has bytes."""
    reading, _ = counts

    def end(_: object = None) -> None:
        if current_process().name == "quorate-stage-1":
            try:
                os.read(reading, 1)
            except BlockingIOError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        if phase == "before":
            end()
        returned: dict[str, torch.Tensor] = EVERYTHING.loss(model, batch)
        if phase == "forward":
            end()
        elif returned["loss"].requires_grad:
            returned["loss"].register_hook(end)
        return returned

    return loss


@contextmanager
def lives(count: int) -> Iterator[list[int]]:
    """A pipe with so many bytes, which processes take."""
    ends = os.pipe()
    try:
        os.set_blocking(ends[0], False)
        os.write(ends[1], bytes(count))
        yield [*ends]
    finally:
        for end in ends:
            os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["before", "forward", "backward"])
def test_a_stage_that_is_killed(unsplit: str, phase: str) -> None:
    with lives(2) as counts:
        assert trained("embedding", loss=killing(phase, counts)) == unsplit
        with pytest.raises(BlockingIOError):
            os.read(counts[0], 1)


@pytest.mark.slow
def test_a_stage_that_is_killed_again_and_again() -> None:
    with (
        lives(50) as counts,
        pytest.raises(QuorateError, match="times") as raised,
    ):
        trained("embedding", loss=killing("forward", counts))
    how = "the last, of stage 1 of 2 (from embedding on), was killed by signal 9 (SIGKILL)"
    assert how in str(raised.value)


def divides_by_zero() -> None:
    raise ZeroDivisionError("in the loss")


def takes_too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def takes_little_by_little() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    taken = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (taken + (64 << 20), before[1]))
    _ = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(1000)]  # more than it leaves


def exits() -> None:
    sys.exit(7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "error", "text"),
    [
        (divides_by_zero, ZeroDivisionError, "in the loss"),
        (takes_too_much, RuntimeError, "allocate"),
        (takes_little_by_little, RuntimeError, "allocate"),
        (exits, ExitError, r"sys.exit\(7\) was called .* in stage 1, shard 0"),
    ],
)
def test_what_a_stage_raises_names_the_stage(
    does: Callable[[], None], error: type[Exception], text: str, way: str
) -> None:
    if way == "threads" and does is takes_little_by_little:
        pytest.skip("the limit would be that of the tests themselves")

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> Any:
        returned = EVERYTHING.loss(model, batch)
        if "quorate-stage-1" in (current_process().name, current_thread().name):
            does()
        return returned

    with pytest.raises(error, match=text) as raised:
        trained("embedding", loss=loss)
    notes = "\n".join(raised.value.__notes__)
    assert "stage 1 of 2 (from embedding on)" in notes
    assert "step 0, shard 0" in notes
    assert ("out of memory on cpu" in notes) == (error is RuntimeError)
    assert not [p for p in active_children() if p.name.startswith("quorate-stage")]


def twice(model: nn.Module, batch: list[torch.Tensor]) -> Any:
    return EVERYTHING.loss(model, batch)["loss"] + EVERYTHING.loss(model, batch)["loss"]


def of_parameters(model: nn.Module, batch: list[torch.Tensor]) -> Any:
    returned = EVERYTHING.loss(model, batch)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return {**returned, "loss": returned["loss"] + 1e-3 * penalty}


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_a_loss_that_uses_parameters_of_all_stages() -> None:
    in_stages = trained("embedding", "dropout", devices="cpu+cpu+cpu", loss=of_parameters)
    assert in_stages == trained(devices="cpu", loss=of_parameters)


def past_the_model(model: Any, batch: list[torch.Tensor]) -> Any:
    loss = EVERYTHING.loss(model, batch)["loss"]
    return loss + model.norm(torch.ones(2, 4, 3, 3)).sum()  # buffers of the first stage


def by_chance(model: nn.Module, batch: list[torch.Tensor]) -> Any:
    returned = EVERYTHING.loss(model, batch)
    random.random()  # to no effect in this shard; who knows of the next one
    return returned


def meddling(change: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A loss in whose backward pass something is done where a shard is compared, the first time.

    Args:
        change: returns the gradient that goes on, of that of the loss.
    """
    is_done: list[bool] = []

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> Any:
        returned = EVERYTHING.loss(model, batch)

        def meddle(gradient: torch.Tensor) -> torch.Tensor:
            if is_done:
                return gradient
            is_done.append(True)
            return change(model, gradient)

        in_stages = any(p.name.startswith("quorate-stage") for p in active_children())
        if in_stages and returned["loss"].requires_grad:  # and not in a stage, which has no child
            returned["loss"].register_hook(meddle)
        return returned

    return loss


def updated_meanwhile(model: nn.Module, gradient: torch.Tensor) -> torch.Tensor:
    for parameter in model.parameters():  # as by an update: no graph knows of it
        parameter.data.mul_(1.5)
    return gradient


@pytest.mark.slow
def test_a_comparison_during_which_parameters_change_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare, found = Pipelined._compare, []

    def watched(*args: Any) -> bool:
        found.append(compare(*args))
        return found[-1]

    monkeypatch.setattr(Pipelined, "_compare", watched)
    trained("lstm", loss=meddling(updated_meanwhile))
    assert found == [False, True]


@pytest.mark.slow
def test_a_difference_with_the_same_parameters_is_refused() -> None:
    loss = meddling(lambda _, gradient: gradient * 1.5)
    with expect_error(SettingError, name="split"):
        trained("lstm", loss=loss)


@pytest.mark.parametrize(
    "options",
    [
        {"split": (), "devices": "cpu+cpu,cpu", "workers": 2},
        {"split": (), "devices": "cpu+" * 29 + "cpu"},
        {"split": (), "precision": "fp16"},
        {"devices": "cpu"},
        {"split": ("lstm", "words")},
        {"split": ("lstn",)},
        {"workers": 2},
        {"workers": quorate.Workers(1, threads=2)},
        {"precision": "fp16"},
        {"compile": True},
        {"pipeline": "2f2b"},
        {"split": ("lstm", "lstm")},
        {"split": ("convolution",)},
        {"split": ("unused",)},
        {"loss": by_chance},
        {"loss": twice},
        {"loss": past_the_model},
    ],
)
def test_what_cannot_be_is_refused_before_the_first_update(options: dict[str, Any]) -> None:
    split = options.pop("split", ("lstm",))
    with expect_error(UserError):
        trained(*split, **options)


class Late(nn.Module):
    """Computes otherwise in the process of a stage, once ``mark`` is there."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        is_late = current_process().name.startswith("quorate-stage") and self.mark.exists()
        return values * (1.01 if is_late else 1.0)


def spot_checked(mark: Path, *, is_made: bool) -> list[str]:
    torch.manual_seed(3)
    trainer = quorate.Trainer(
        nn.Sequential(nn.Linear(4, 4), Late(mark), nn.Linear(4, 1)),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=8,
        shards=2,
        devices="cpu+cpu",
        workers=quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(split=["2"], spot_check_every=1),
    )
    rows = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    doubts = []
    for report in trainer.updates(rows, epochs=1):
        doubts += report.doubts
        if is_made and report.global_step == 2:
            mark.touch()
    return doubts


def test_a_spot_check_goes_through_the_stages(tmp_path: Path) -> None:
    assert spot_checked(tmp_path / "none", is_made=False) == []
    (doubt,) = spot_checked(tmp_path / "mark", is_made=True)
    assert "a different result through the stages than in one piece" in doubt
