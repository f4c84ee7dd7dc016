"""Changes by user code between two updates, against a loop of plain torch with the same changes."""

import os
import random
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import front_door
from support.digests import digest
from support.fits import Calls, squares
from support.messages import expect_error
from support.plain_loop import assert_close, plain_loop
from support.references import References
from support.runs import command, digests, last_json, run, run_all
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import UserError

STEPS, FEATURES = 30, 6
# The training below, as a run of the command.
SCRIPT = f"""
import json, sys
sys.path[:] = {sys.path} + [{str(Path(__file__).parent)!r}]
from test_user_changes import trained
print(json.dumps(trained(*map(int, sys.argv[1:]))))
"""


class Student(nn.Module):
    """A linear map whose target is partly a frozen teacher's, with buffers and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.last = nn.Linear(5, 1)
        self.teacher = nn.Linear(FEATURES, 1).requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(FEATURES), persistent=False)
        self.beta = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table
        own = self.last(torch.tanh(self.first(x))) * self.scale
        return own - self.beta * self.teacher(x) - 0.01 * self.count


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(48, FEATURES, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randn(48, 1, generator=draw, dtype=torch.float64))


def made() -> Student:
    torch.manual_seed(0)
    return Student().double()


def change(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change something else after each update."""
    n = step % 12
    with torch.no_grad():
        if n == 1:
            model.first.weight.data = model.first.weight.data.clamp(-0.3, 0.3)
        elif n == 2:
            model.teacher.weight.data.mul_(0.9)
            model.teacher.bias.data = model.teacher.bias.data + 0.1
        elif n == 3:
            model.scale.fill_(1.5)
            model.count.add_(2)
        elif n == 4:
            model.scale = torch.full((1,), 0.75, dtype=torch.float64)
            model.table = torch.linspace(-1, 1, FEATURES, dtype=torch.float64)
        elif n == 5:
            optimizer.param_groups[0]["lr"] = 0.02
        elif n == 6:
            model.beta = 0.25
        elif n == 7:
            values = {k: v * 0.5 for k, v in model.state_dict().items() if v.is_floating_point()}
            model.load_state_dict(values, strict=False)
        elif n == 8:
            flat = nn.utils.parameters_to_vector(model.last.parameters())
            nn.utils.vector_to_parameters(flat + 0.1, model.last.parameters())
        elif n == 9:
            # With different strides.
            model.first.weight.data = model.first.weight.data.t().contiguous().t()
            model.teacher.weight.copy_(model.teacher.weight + 0.2)
        elif n == 10:
            model.table.data = model.table.data.flip(0)
            optimizer.param_groups[0]["momentum"] = 0.5


class Changes(quorate.Callback):
    """Changes the model after each update; kills a worker now and then, if told to."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], kills: int) -> None:
        self.optimizers, self.kills = optimizers, kills

    def started(self, trainer: Any) -> None:
        self.trainer = trainer
        if trainer.global_step == 0:
            trainer.model.teacher.weight.data = trainer.model.teacher.weight.data * 2

    def updated(self, report: Any) -> None:
        change(self.trainer.model, self.optimizers[-1], report.global_step)
        if report.global_step == self.kills:
            pids = [worker.pid for worker in self.trainer.workers if worker.pid]
            os.kill(pids[0], signal.SIGKILL)


def values_of(model: Any) -> dict[str, Any]:
    values = {name: value.tolist() for name, value in model.state_dict().items()}
    return {**values, "table": model.table.tolist(), "beta": model.beta}


def trained(steps: int, kills: int = -1, **settings: Any) -> dict[str, Any]:
    optimizers: list[torch.optim.Optimizer] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        return optimizers[-1]

    trainer = quorate.Trainer(
        made(),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=optimizer,
        batch_size=12,
        shards=3,
        **settings,
    )
    trainer.fit(dataset(), steps=steps, shuffle=False, callbacks=[Changes(optimizers, kills)])
    return values_of(trainer.model)


def assert_is_that_of_a_plain_loop(got: dict[str, Any]) -> None:
    model, optimizers = made(), list[torch.optim.Optimizer]()
    model.teacher.weight.data = model.teacher.weight.data * 2

    def sgd(params: Any) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(params, lr=0.05, momentum=0.9))
        return optimizers[0]

    def updated(step: int, _loss: float) -> None:
        change(model, optimizers[0], step)

    plain_loop(model, sgd, squares, dataset(), steps=STEPS, updated=updated)
    expected = values_of(model)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        found, wanted = (torch.tensor(v, dtype=torch.float64) for v in (got[name], value))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("workers", [1, 3])
def test_changes_are_those_of_a_plain_loop(workers: int) -> None:
    options = {"devices": "cpu", "workers": quorate.Workers(workers, engine="towers")}
    assert_is_that_of_a_plain_loop(trained(STEPS, **options))


def test_changes_reach_all_workers_and_checkpoints(tmp_path: Path, references: References) -> None:
    """Change on processes, with a killed worker, and with a resume on another engine."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    towers, processes = ("--engine", "towers"), ("--engine", "processes")

    def words(name: str, engine: tuple[str, str], steps: int, kill: str = "-1") -> list[str]:
        options = (*engine, "--workers", "2", "--run-dir", str(tmp_path / name))
        return command(script, str(steps), kill, options=options)

    first = {"killed": words("killed", processes, STEPS, "8"), "half": words("half", towers, 7)}
    second = {"half": words("half", processes, STEPS)}
    for name, end in (run_all(first) | run_all(second)).items():
        assert end.code == 0, f"{name}: {end.said}"
        assert_is_that_of_a_plain_loop(last_json(end.out))
    expected = references.on_a_tower(str(script), str(STEPS)).digests
    assert {digests(tmp_path / name) for name in first} == {expected}


# --- one change each, on towers in this process ---------------------------------------------------

ROWS = TensorDataset(
    torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.randn(16, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
)
SGD = partial(torch.optim.SGD, lr=0.1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4).double()
        self.head = nn.Linear(4, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def frozen(model: Two) -> Two:
    model.body.requires_grad_(False)
    return model


def trainer(
    model: Any, run_dir: Path | None = None, workers: int = 2, loss: Any = squares, **options: Any
) -> quorate.Trainer:
    sizes = {"batch_size": 8, "shards": 2, "devices": "cpu", "engine": "towers"}
    settings = {"optimizer": SGD, "workers": workers, "run_dir": run_dir, **sizes, **options}
    return front_door.trainer(model, loss, **settings)


def unfreezing(model: Any, step: int) -> None:
    """The body learns only in steps 4 to 6."""
    if step in (0, 4):
        model.body.requires_grad_(step == 4)
    if step == 7:
        model.body.requires_grad_(False)


def test_gradual_unfreezing(tmp_path: Path) -> None:
    """A loop of one's own; the switch outlives a resume, and reaches new replicas."""
    for end in (5, 10):
        model = Two()
        training = trainer(model, tmp_path, workers=end % 3 + 1)
        for update in training.updates(ROWS, steps=end, shuffle=False):
            unfreezing(model, update.global_step)
            training.evaluate(ROWS)
        training.save()
    plain = Two()
    updated = lambda step, _loss: unfreezing(plain, step)  # noqa: E731
    plain_loop(plain, SGD, squares, ROWS, steps=10, batch_size=8, updated=updated)
    assert_close(model, plain, 1e-12)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


THAW = """
import sys, torch, quorate
class Thaw(quorate.Callback):
    def started(self, trainer):
        self.part = trainer.model[0].requires_grad_(False)
    def updated(self, report):
        self.part.requires_grad_(report.global_step > 3)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
trainer = quorate.Trainer(model, lambda model, rows: model(rows[0]).mean(),
    optimizer=torch.optim.Adam, batch_size=8, shards=2)
trainer.fit([(row,) for row in torch.randn(64, 3)], steps=int(sys.argv[1]), callbacks=[Thaw()])
"""


def test_ranks_thaw_what_a_checkpoint_had_frozen(tmp_path: Path, references: References) -> None:
    (script := tmp_path / "script.py").write_text(THAW)
    ranks = ("--engine", "collective", "--workers", "2", "--run-dir", f"{tmp_path}/run")
    assert [run(command(script, steps, options=ranks)).code for steps in ("2", "6")] == [0, 0]
    assert digests(tmp_path / "run") == references.on_a_tower(str(script), "6").digests


def test_a_frozen_parameter_that_wants_a_gradient_is_refused_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    model = frozen(Two())

    def unfreeze(_: Any, report: quorate.Report) -> None:
        if report.global_step == 3:
            model.body.requires_grad_(True)

    with expect_error(UserError, name="parameter 'body.weight'", got="requires_grad=True"):
        trainer(model, tmp_path).fit(ROWS, steps=9, callbacks=[Calls(unfreeze)])
    again = trainer(frozen(Two()), tmp_path)
    again.fit(ROWS, steps=4)
    assert again.global_step == 4


WIDER = torch.zeros(1, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("parameter 'head.weight'", lambda model: setattr(model.head.weight, "data", WIDER)),
        ("the model", lambda model: setattr(model, "head", nn.Tanh())),
    ],
    ids=["of another shape", "another module"],
)
def test_what_cannot_be_carried_is_refused(name: str, change: Any) -> None:
    with expect_error(UserError, name=name):
        trainer(Two()).fit(ROWS, steps=9, callbacks=[Calls(lambda run, _: change(run.model))])


def test_an_attribute_that_is_no_number_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = Two()
    model.names = ["a"]
    sets = Calls(lambda *_: setattr(model, "names", ["b"]))
    trainer(model).fit(ROWS, steps=3, callbacks=[sets])
    assert "Two.names of 'the model' was set to a new list" in capsys.readouterr().out


class Partial(Two):
    """Has a state dict with the head under another name, without the body, with a copy of a third.

    The model has a buffer that is not persistent, and changes in training.
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


def test_what_a_state_dict_leaves_out_outlives_a_resume(tmp_path: Path) -> None:
    def everything(training: quorate.Trainer) -> str:
        both = training.model, training.averaged_model
        assert both[1] is not None
        parameters = [item for model in both for item in model.named_parameters()]
        return digest([*parameters, *training.model.named_buffers()])

    options = {"optimizer": partial(torch.optim.Adam, lr=0.05), "ema_decay": 0.9}
    through = trainer(Partial(), workers=1, **options)
    through.fit(ROWS, steps=9)
    trainer(Partial(), tmp_path, **options).fit(ROWS, steps=4)
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert load_file(saved / "model.safetensors").keys() == Partial().state_dict().keys()
    resumed = trainer(Partial(), tmp_path, workers=1, **options)
    resumed.fit(ROWS, steps=9)
    assert everything(resumed) == everything(through)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: model.head.register_forward_hook(lambda *_: None),
            "because a hook of module 'head' was registered or removed between two updates",
        ),
        (lambda _: random.random(), "draws from Python's random or NumPy: after a resume"),
        (lambda _: torch.rand(1), None),
    ],
)
def test_what_workers_do_not_see_is_doubted(
    change: Any, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two()
    for update in trainer(model).updates(ROWS, steps=4):
        if update.global_step == 2:
            change(model)
    assert said in caplog.text if said is not None else "same bits: no" not in caplog.text
