"""Several models in one training: a plain loop, rounds, refusals, checkpoints, resumes."""

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest
from support.forgery.forged import Forged
from support.messages import expect_error
from support.trainings.models import critic, generator
from torch import nn
from torch.nn.utils import parameters_to_vector as vector
from torch.utils.data import TensorDataset

import quorate
from quorate.__main__ import main
from quorate.errors import CheckpointError, LossError, SettingError

ROWS = 58  # 6 batches of 10, the last of 8 rows


def dataset(dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Rows of five features, and the noise of each."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(ROWS, 5, generator=generator, dtype=dtype),
        torch.randn(ROWS, 3, generator=generator, dtype=dtype),
    )


def d_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    real, fake = model["d"](batch[0]), model["d"](model["g"](batch[1]))
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    return {"loss": loss, "right": (real > 0).float().mean()}


def g_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.softplus(-model["d"](model["g"](batch[1]))).mean()


LOSSES = [("d", d_loss), ("d", d_loss), ("g", g_loss)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.5, 0.99))


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


OPTIMIZERS = {
    "d": quorate.Optimize(sgd, clip_norm=0.2),
    "g": quorate.Optimize(adam, schedule=halved, ema_decay=0.9),
}


def models() -> dict[str, nn.Module]:
    return {"g": generator(3, 8, 5), "d": critic(5, 8, 0.0)}


def trainer(loss: Any = LOSSES, model: Any = models, **options: Any) -> quorate.Trainer:
    defaults = {"optimizer": OPTIMIZERS, "batch_size": 10, "shards": 2, "devices": ["cpu"]}
    return quorate.Trainer(model, loss, **defaults | options)


def plain_loop(model: nn.ModuleDict, epochs: int) -> list[tuple[str, float]]:
    """Train as ``trainer`` does, by hand: the phase and the loss of each update."""
    shards, made = 2, list[tuple[str, float]]()
    data = dataset(torch.float64)
    optimizers = {
        name: each.optimizer([*model[name].parameters()]) for name, each in OPTIMIZERS.items()
    }
    scheduler = halved(optimizers["g"])

    def update(name: str, loss: Any, shards: list[list[torch.Tensor]]) -> None:
        rows = sum(len(shard[0]) for shard in shards)
        model.zero_grad()
        before = {k: v.clone() for k, v in model.named_buffers()}
        after = {k: torch.zeros_like(v) for k, v in before.items() if v.is_floating_point()}
        total = 0.0
        for shard in shards:  # each from the buffers as before; the mean follows
            for key, value in model.named_buffers():
                if key in after:
                    value.copy_(before[key])
            returned = loss(model, shard)
            value = returned["loss"] if isinstance(returned, dict) else returned
            share = len(shard[0]) / rows
            (share * value).backward()
            total += share * value.item()
            for key, buffer in model.named_buffers():
                if key in after:
                    after[key] += share * buffer
        for key, buffer in model.named_buffers():
            if key in after:
                buffer.copy_(after[key])
        if name == "d":
            torch.nn.utils.clip_grad_norm_(model["d"].parameters(), 0.2)
        optimizers[name].step()
        if name == "g":
            scheduler.step()
        made.append((name, total))

    for _ in range(epochs):
        for number, start in enumerate(range(0, ROWS, 10)):
            rows = min(10, ROWS - start)
            cuts = [start + s * rows // shards for s in range(shards + 1)]
            for name, loss in (("d", d_loss), ("g", g_loss))[: 1 + number % 2]:
                update(name, loss, [[*data[cuts[s] : cuts[s + 1]]] for s in range(shards)])
    return made


def test_a_gan_is_that_of_a_plain_loop() -> None:
    torch.manual_seed(5)
    ours = {name: each.double() for name, each in models().items()}
    plain = nn.ModuleDict(copy.deepcopy(ours))
    expected = plain_loop(plain, 2)
    training = trainer(model=ours)
    reports = []
    for report in training.updates(dataset(torch.float64), epochs=2, shuffle=False):
        reports.append(report)
        assert all(p.requires_grad for p in training.model.parameters())
    assert [(report.phase, len(reports)) for report in reports] == [(n, 18) for n, _ in expected]
    for report, (name, loss) in zip(reports, expected, strict=True):
        assert report.loss == report.metrics[f"{name}/loss"] == pytest.approx(loss, abs=1e-12)
        assert ("d/right" in report.metrics) == (name == "d")
        assert (report.grad_norm is None) == (name == "g")
    assert [r.lr for r in reports if r.phase == "g"] == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]
    found = training.model.state_dict()
    for key, value in plain.state_dict().items():
        if value.is_floating_point():  # a batch is counted once, for any number of shards
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-9, msg=key)


def test_phases_that_train_several_parts_or_the_same(tmp_path: Path) -> None:
    losses = [
        quorate.Phase("warm", g_loss, trains="g"),
        quorate.Phase("both", d_loss, trains=("g", "d")),
        quorate.Phase("g", g_loss, new_batch=True),
    ]
    choices = {"warm": adam, "both": quorate.Optimize(adam, ema_decay=0.9), "g": adam}
    whole, phases = trainer(losses, optimizer=choices), list[Any]()
    shadow = vector(whole.model.parameters()).detach()
    for report in whole.updates(dataset(), epochs=1):
        phases.append(report.phase)
        if report.phase == "both":  # the others leave the average of common parameters alone
            new = vector(whole.model.parameters()).detach()
            shadow.lerp_(new, 9 / (10 + phases.count("both")))
    assert phases == ["warm", "both", "g"] * 3
    assert whole.updates_per_epoch(dataset(), "g") == 3
    for steps in (4, 9):  # each phase has separate moments for common parameters
        last = trainer(losses, optimizer=choices, devices=["cpu"] * 2, run_dir=tmp_path)
        last.fit(dataset(), steps=steps)
    assert digest(last.model.state_dict().items()) == digest(whole.model.state_dict().items())
    torch.testing.assert_close(vector(last.averaged_model.parameters()).detach(), shadow)


def test_a_tied_weight_is_trained_by_the_phases_of_its_parts() -> None:
    def tied() -> dict[str, nn.Module]:
        torch.manual_seed(2)
        parts = {"one": nn.Linear(5, 5).double(), "two": nn.Linear(5, 5).double()}
        parts["two"].weight = parts["one"].weight
        return parts

    def squares(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        return (model["two"](model["one"](batch[0])) - 1).square().mean()

    phases = {"one": squares, "two": squares}
    training = trainer(phases, tied, optimizer=sgd)
    training.fit(dataset(torch.float64), steps=4, shuffle=False)
    plain = nn.ModuleDict(tied())
    optimizers = [sgd([*plain[name].parameters()]) for name in phases]
    for step in range(4):
        plain.zero_grad()
        squares(plain, [*dataset(torch.float64)[step // 2 * 10 : step // 2 * 10 + 10]]).backward()
        optimizers[step % 2].step()
    for mine, theirs in zip(training.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_evaluation_has_the_metrics_of_all_phases() -> None:
    def counted(model: nn.ModuleDict, batch: list[torch.Tensor]) -> dict[str, Any]:
        return {**d_loss(model, batch), "count": torch.tensor([len(batch[0])])}

    training = trainer(
        {"d": counted, "g": g_loss}, totals={"count": lambda total: {"rows": int(total)}}
    )
    reports = [*training.updates(dataset(), steps=2)]
    assert [report.metrics.get("rows") for report in reports] == [10, None]
    found = training.evaluate(dataset(), averaged=False)
    assert [*found] == ["d/loss", "d/right", "g/loss", "rows"]
    assert found["rows"] == ROWS
    training.model.eval()
    whole = list(dataset().tensors)
    with torch.no_grad():
        assert found["g/loss"] == pytest.approx(g_loss(training.model, whole).item(), abs=1e-6)  # type: ignore[arg-type]


def test_an_update_that_is_not_finite_counts_for_its_phase() -> None:
    def spoilt(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = g_loss(model, batch)
        return loss * float("inf") if (batch[1][:, 0] > 2.0).any() else loss

    training = trainer(
        {"d": d_loss, "g": spoilt},
        optimizer={"d": sgd, "g": quorate.Optimize(adam, schedule=halved, nonfinite="skip")},
    )
    reports = [*training.updates(dataset(), epochs=2)]
    counts = [(r.phase, r.not_finite) for r in reports if r.not_finite]
    assert counts[::4] == [("g", 1), ("g", 2), ("g", 2), ("g", 2)]
    assert [r.lr for r in reports if r.phase == "g"] == [0.01 * 0.5 ** (n // 2) for n in range(12)]


# --- refusals -------------------------------------------------------------------------------------

REFUSED: list[tuple[str, object, dict[str, Any]]] = [
    ("loss", "no phase", {"loss": {}}),
    ("trains of phase 'e'", "e", {"loss": {"d": d_loss, "e": g_loss}, "optimizer": sgd}),
    ("loss", "no phase for g.first.weight", {"loss": {"d": d_loss}, "optimizer": sgd}),
    ("loss", "two phases 'd'", {"loss": [("d", d_loss), ("d", g_loss)], "optimizer": sgd}),
    ("loss 'g'", "<lambda>(model)", {"loss": {"d": d_loss, "g": lambda model: model}}),
    ("optimizer", "d", {"optimizer": {"d": sgd}}),
    ("optimizer", "a dict of d, g", {"loss": g_loss}),
    ("update", "async", {"update": "async"}),
    ("servers", 2, {"workers": quorate.Workers(engine="ray", servers=2)}),
    ("model", "an empty dict", {"model": {}}),
    ("model", "keys", {"model": {"keys": nn.Identity}}),
]


@pytest.mark.parametrize(
    ("name", "got", "options"), REFUSED, ids=[f"{n} {row[0]}" for n, row in enumerate(REFUSED)]
)
def test_refused_in_one_line(name: str, got: object, options: dict[str, Any]) -> None:
    with expect_error(SettingError, name=name, got=got) as raised:
        trainer(**options)
    assert "\n" not in str(raised.value)


def test_refused_when_training_begins() -> None:
    lbfgs = {"d": torch.optim.LBFGS, "g": adam}
    with expect_error(SettingError, name="optimizer", got="LBFGS in phase 'd'"):
        trainer(optimizer=lbfgs).fit(dataset())
    with expect_error(SettingError, name="batch_size", got="58 of 58 rows"):
        trainer(batch_size=ROWS).fit(dataset())

    def of_the_other(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        return model["d"](batch[0]).mean()  # type: ignore[no-any-return]

    with expect_error(LossError, name="loss") as raised:
        trainer({"d": d_loss, "g": of_the_other}).fit(dataset())
    assert "(phase g)" in "".join(raised.value.__notes__)


# --- checkpoints ----------------------------------------------------------------------------------


def test_what_is_saved_is_shown_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path / "run"}
    first = trainer(**options)
    first.fit(dataset(), steps=5)
    capsys.readouterr()
    assert main(["inspect", "--all", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "d: 4 updates, SGD, clip_norm 0.2" in shown
    assert "g: 1 updates, Adam, StepLR, ema_decay 0.9" in shown
    fresh = nn.ModuleDict(models())
    quorate.load_weights(fresh, tmp_path / "run")
    assert digest(fresh.state_dict().items()) == digest(first.model.state_dict().items())
    others = [({"d": d_loss, "g": g_loss}, OPTIMIZERS), (LOSSES, {**OPTIMIZERS, "d": adam})]
    for loss, optimizer in others:
        with expect_error(CheckpointError):
            trainer(loss, optimizer=optimizer, **options).fit(dataset(), steps=9)
    clipped = {**OPTIMIZERS, "d": quorate.Optimize(sgd, clip_norm=0.5)}
    trainer(optimizer=clipped, **options).fit(dataset(), steps=6)
    assert "clip_norm of phase d was 0.2 and is 0.5" in capsys.readouterr().out


FORGERIES: dict[str, tuple[Callable[[Forged], object], str]] = {
    "no phases": (lambda f: f.record.pop("phases"), "other phases"),
    "no round": (lambda f: f.record.pop("round"), "an epoch has 6 steps"),
    "a count": (lambda f: f.record["phases"][0].update(updates=3), "updates of all phases"),
    "a kind": (lambda f: f.record["phases"][0].update(optimizer="Adam"), "got optimizer="),
    "batches": (lambda f: f.record["round"].update(takes=[0, 2, 2]), "got a round that is none"),
    "a schedule": (lambda f: f.record["phases"][1].update(schedule_state={"dict": []}), "schedule"),
    "an average": (lambda f: f.record["phases"][1].update(ema_decay=None), "ema_decay=None"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 4 and 8."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    trainer(run_dir=quorate.RunDir(run_dir, save_every_steps=4)).fit(dataset(), steps=8)
    return run_dir


@pytest.mark.parametrize("name", [*FORGERIES])
def test_a_forged_checkpoint_is_passed_over(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(saved, run_dir)
    forged = Forged(run_dir / "checkpoints" / f"step-{8:012d}", random.Random(0))
    change, why = FORGERIES[name]
    change(forged)
    forged.write()
    trainer(run_dir=run_dir).fit(dataset(), steps=9)
    said = capsys.readouterr().out
    (skipped,) = [s for s in said.splitlines() if s.startswith("skipped a checkpoint: ")]
    assert why in skipped
    assert "a round of updates is d, d, g, on 2 batches; an epoch has 9 updates" in said
    assert "resumed step 4 " in said
    assert main(["inspect", str(run_dir)]) == 0
