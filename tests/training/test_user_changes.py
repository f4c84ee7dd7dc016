"""What user code changes between two updates, against a loop of plain torch that does the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scripts.user_changes import BATCH, ROWS, change, dataset, loss, made
from support.messages import expect_error
from support.runs import command, digests, last_json, run, run_all
from torch import nn

import quorate
from quorate.errors import UserError
from quorate.replica.flat import Layout
from quorate.replica.model import trainable
from quorate.replica.notes import Notes
from quorate.training.user_changes import UserChanges

STEPS = 30


def plain(steps: int) -> dict[str, Any]:
    """The same training in plain torch."""
    model = made()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    model.teacher.weight.data = model.teacher.weight.data * 2
    x, y = dataset().tensors
    for step in range(steps):
        at = step * BATCH % ROWS
        optimizer.zero_grad()
        loss(model, [x[at : at + BATCH], y[at : at + BATCH]]).backward()
        optimizer.step()
        change(model, optimizer, step + 1)
    values = {name: value.tolist() for name, value in model.state_dict().items()}
    return {**values, "table": model.table.tolist(), "beta": model.beta}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.tensor(got[name], dtype=torch.float64),
            torch.tensor(value, dtype=torch.float64),
            rtol=1e-10,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.slow
def test_changes_reach_all_workers_and_checkpoints(tmp_path: Path) -> None:
    """On towers and processes, with a worker killed, and resumed on another engine."""
    towers, processes = ("--engine", "towers"), ("--engine", "processes", "--workers", "2")

    def words(name: str, *options: str, steps: int = STEPS, kill: str = "-1") -> list[str]:
        where = ("--run-dir", str(tmp_path / name))
        return command("user_changes.py", str(steps), kill, options=(*options, *where))

    ended = run_all(
        {
            "one": words("one", *towers, "--workers", "1"),
            "three": words("three", *towers, "--workers", "3"),
            "processes": words("processes", *processes),
            "killed": words("killed", *processes, kill="8"),
            "half": words("half", *towers, "--workers", "2", steps=7),
            "other half": words("other half", *processes, steps=17),
        }
    )
    ended["half"] = run(words("half", *processes))
    ended["other half"] = run(words("other half", *towers, "--workers", "2"))
    for name, end in ended.items():
        assert end.code == 0, f"{name}: {end.said}"
        assert_same(last_json(end.out), plain(STEPS))
    assert len({digests(tmp_path / name) for name in ended}) == 1


# --- one change each, on towers in this process --------------------------------------------------

ROWS_OF_TWO = torch.utils.data.TensorDataset(
    torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.randn(16, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4).double()
        self.head = nn.Linear(4, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def two_trainer(model: nn.Module, run_dir: Path | None = None, workers: int = 2) -> quorate.Trainer:
    return quorate.Trainer(
        model,
        loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
        run_dir=run_dir,
    )


def unfreezing(model: nn.Module, step: int) -> None:
    """The body learns only in steps 4 to 6."""
    if step in (0, 7):
        model.body.requires_grad_(False)
    if step == 4:
        model.body.requires_grad_(True)


def two_in_plain_torch(steps: int, change: Callable[[nn.Module, int], None]) -> nn.Module:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = ROWS_OF_TWO.tensors
    change(model, 0)
    for step in range(steps):
        at = step * 8 % 16
        optimizer.zero_grad()
        loss(model, [x[at : at + 8], y[at : at + 8]]).backward()
        optimizer.step()
        change(model, step + 1)
    return model


@pytest.mark.parametrize("resumed_at", [None, 2, 5, 8])
def test_gradual_unfreezing(tmp_path: Path, resumed_at: int | None) -> None:
    """A loop of one's own; the switch outlives a resume, and reaches new replicas."""
    ends = [10] if resumed_at is None else [resumed_at, 10]
    for end in ends:
        model = Two()
        trainer = two_trainer(model, tmp_path, workers=end % 3 + 1)
        body_before = None
        if len(ends) == 1 or end != 10:
            unfreezing(model, 0)  # before any loop: then it is not trained at all
            model.body.requires_grad_(True)
        for update in trainer.updates(ROWS_OF_TWO, steps=end, shuffle=False):
            if update.global_step == 1 and body_before is None:
                body_before = model.body.weight.clone()
            unfreezing(model, update.global_step)
            trainer.evaluate(ROWS_OF_TWO)
        trainer.save()
    expected = two_in_plain_torch(10, lambda m, n: unfreezing(m, n) if n else None)
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert got.requires_grad == want.requires_grad


def test_a_frozen_parameter_that_wants_a_gradient_is_refused_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    model = Two()
    model.body.requires_grad_(False)
    trainer = two_trainer(model, tmp_path)

    class Unfreezes(quorate.Callback):
        def updated(self, report: Any) -> None:
            if report.global_step == 3:
                model.body.requires_grad_(True)

    with expect_error(UserError, name="parameter 'body.weight'", got="requires_grad=True"):
        trainer.fit(ROWS_OF_TWO, steps=9, callbacks=[Unfreezes()])
    again = two_trainer(_frozen(Two()), tmp_path)
    again.fit(ROWS_OF_TWO, steps=4)
    assert again.global_step == 4


def _frozen(model: Two) -> Two:
    model.body.requires_grad_(False)
    return model


@pytest.mark.parametrize("what", ["shape", "object"])
def test_what_cannot_be_carried_is_refused(tmp_path: Path, what: str) -> None:
    model = Two()
    trainer = two_trainer(model, tmp_path)

    class Replaces(quorate.Callback):
        def updated(self, report: Any) -> None:
            if what == "shape":
                model.head.weight.data = torch.zeros(1, 5, dtype=torch.float64)
            else:
                model.head.weight = nn.Parameter(torch.zeros(1, 4, dtype=torch.float64))

    with expect_error(UserError, name="parameter 'head.weight'"):
        trainer.fit(ROWS_OF_TWO, steps=9, callbacks=[Replaces()])


def test_an_attribute_that_is_no_number_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = Two()
    model.names = ["a"]
    trainer = two_trainer(model)

    class Sets(quorate.Callback):
        def updated(self, report: Any) -> None:
            model.names = ["b"]

    trainer.fit(ROWS_OF_TWO, steps=3, callbacks=[Sets()])
    assert "Two.names of 'the model' was set to a new list" in capsys.readouterr().out


# --- what a state dict leaves out ----------------------------------------------------------------


class Partial(Two):
    """Its state dict has the head under another name, the body not at all, and a copy of a third.

    It has a buffer that is not persistent, and that training changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(1, 1).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        if self.training:
            self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.third(self.head(hidden - self.mean))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {
            "top": found["head.weight"],
            "head.bias": found["head.bias"],
            "third.weight": found["third.weight"].clone(),
            "third.bias": found["third.bias"],
        }


def partial_trainer(run_dir: Path | None, workers: int) -> quorate.Trainer:
    return quorate.Trainer(
        Partial(),
        loss,
        optimizer=quorate.Optimize(lambda p: torch.optim.Adam(p, lr=0.05), ema_decay=0.9),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
        run_dir=run_dir,
    )


def test_what_a_state_dict_leaves_out_outlives_a_resume(tmp_path: Path) -> None:
    through = partial_trainer(None, 1)
    through.fit(ROWS_OF_TWO, steps=9)
    partial_trainer(tmp_path, 2).fit(ROWS_OF_TWO, steps=4)
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert load_file(saved / "model.safetensors").keys() == Partial().state_dict().keys()
    resumed = partial_trainer(tmp_path, 1)
    resumed.fit(ROWS_OF_TWO, steps=9)
    for got, want in zip(resumed.model.parameters(), through.model.parameters(), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(resumed.model.mean, through.model.mean)
    for one, other in zip(
        resumed._prepared.state.average.shadow.vectors,
        through._prepared.state.average.shadow.vectors,
        strict=True,
    ):
        assert torch.equal(one, other)


def test_a_model_that_changed_after_a_save_is_saved_again(tmp_path: Path) -> None:
    model = Two()
    trainer = two_trainer(model, tmp_path)
    for _ in trainer.updates(ROWS_OF_TWO, steps=3):
        pass
    path = trainer.save()
    model.head.weight.data = model.head.weight.data * 2
    assert trainer.save() == path
    assert torch.equal(load_file(path / "model.safetensors")["head.weight"], model.head.weight)


def test_a_write_through_data_is_counted_where_workers_are_compared() -> None:
    """It leaves no trace but the values: a worker that comes late computes from these."""
    model = Two()
    model.body.requires_grad_(False)
    parameters = Layout(trainable(model).items()).new(torch.device("cpu"))
    changes = UserChanges(model, parameters, (), Notes())
    before = changes.count()
    changes.look()
    assert changes.count() == before
    model.body.weight.data.mul_(0.5)
    assert changes.count() != before


class Four(nn.Module):
    """Two layers of one shape that are trained, and two frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        for layer in [*self.layers][2:]:
            layer.requires_grad_(False)


def test_values_that_are_exchanged_by_data_are_exchanged() -> None:
    """Each reads what is in another's memory: all are read before any is written."""
    model = Four()
    trained = trainable(model)
    parameters = Layout(trained.items()).new(torch.device("cpu"))
    for name, parameter in trained.items():
        parameters.views[name].copy_(parameter.detach())
        parameter.data = parameters.views[name]
    changes = UserChanges(model, parameters, (), Notes())
    before = [layer.weight.detach().clone() for layer in model.layers]
    a, b, c, d = (layer.weight for layer in model.layers)
    a.data, b.data, c.data, d.data = b.data, c.data, d.data, a.data
    changes.look()
    for layer, number in zip(model.layers, (1, 2, 3, 0), strict=True):
        assert torch.equal(layer.weight, before[number])
    for name, view in parameters.views.items():
        assert trained[name].is_set_to(view)


def _after_two(change: Callable[[quorate.Trainer], object]) -> None:
    """Train for four steps on two towers; the loop's body calls ``change`` after the second."""
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(2, engine="towers"),
    )
    rows = torch.utils.data.TensorDataset(torch.ones(8, 3))
    for update in trainer.updates(rows, steps=4):
        if update.global_step == 2:
            change(trainer)


def test_another_module_is_refused() -> None:
    def change(trainer: quorate.Trainer) -> None:
        trainer.model[1] = nn.Tanh()

    with expect_error(UserError, name="the model"):
        _after_two(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda trainer: trainer.model[0].register_forward_hook(lambda *_: None),
            "because a hook of module '0' was registered or removed between two updates",
        ),
        (lambda _: random.random(), "draws from Python's random or NumPy: after a resume"),
        (lambda _: torch.rand(1), None),
    ],
)
def test_what_workers_do_not_see_is_doubted(
    change: Callable[[quorate.Trainer], object],
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _after_two(change)
    out = caplog.text
    assert said in out if said is not None else "same bits: no" not in out


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_that_begins_to_draw_late_is_no_draw_between_shards(workers: int) -> None:
    def late(model: nn.Module, batch: list[torch.Tensor], at: Any) -> torch.Tensor:
        noise = np.random.normal() + random.random() if at.step >= 3 else 0.0
        return (model(batch[0]) + noise).square().mean()

    trainer = quorate.Trainer(
        lambda: nn.Linear(3, 1),
        late,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        shards=4,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
    )
    rows = torch.utils.data.TensorDataset(torch.ones(8, 3))
    doubts: list[str] = []
    for update in trainer.updates(rows, steps=8):
        doubts += update.doubts
        if update.global_step == 6:
            random.random()  # a draw between shards is noticed as ever
        elif update.global_step < 6:
            assert doubts == []
    (doubt,) = doubts
    assert "draws from Python's random or NumPy" in doubt
