"""Several models in one training: beside a plain loop, on towers, resumed, and refused."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest_of
from support.forgery import Forged
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.commands.main import main
from quorate.coordination.plan import Plan
from quorate.coordination.protocol import Keep
from quorate.errors import CheckpointError, LossError, SettingError
from quorate.services.checkpoints.files import checkpoint_of
from quorate.testing import in_memory

ROWS = 58  # 6 batches of 10, the last of 8 rows


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(F.relu(self.norm(self.first(noise))))
        return made


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = self.last(F.leaky_relu(self.first(rows), 0.2))
        return said


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


def noisy_g_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
    noise = torch.randn(len(batch[1]), 3)
    return F.softplus(-F.dropout(model["d"](model["g"](noise)), 0.2)).mean()


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
    return {"g": Generator(), "d": Critic()}


def trainer(loss: Any = LOSSES, model: Any = models, **options: Any) -> quorate.Trainer:
    defaults = {"optimizer": OPTIMIZERS, "batch_size": 10, "shards": 2, "devices": ["cpu"]}
    return quorate.Trainer(model, loss, **defaults | options)


def plain_loop(
    model: nn.ModuleDict, epochs: int, kept: list[list[int]] | None = None
) -> list[tuple[str, float]]:
    """Train as ``trainer`` does, by hand: the phase and the loss of each update.

    Args:
        kept: the shards of each update, of three; by default both of two.
    """
    plan = Plan(rows=ROWS, batch_size=10, shards=2 if kept is None else 3)
    data, n, made = dataset(torch.float64), 0, list[tuple[str, float]]()
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
        for shard in shards:  # each from the buffers as they were; what they become is a mean
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
        for batch in range(plan.steps_per_epoch):
            for name, loss in (("d", d_loss), ("g", g_loss))[: 1 + batch % 2]:
                ours = range(plan.shards_of(n)) if kept is None else kept[len(made)]
                update(name, loss, [[c[plan.shard(n, s)] for c in data.tensors] for s in ours])
            n += 1
    return made


def test_a_gan_is_that_of_a_plain_loop() -> None:
    torch.manual_seed(5)
    ours = {name: each.double() for name, each in models().items()}
    plain = nn.ModuleDict(copy.deepcopy(ours))
    expected = plain_loop(plain, 2)
    training = trainer(model=ours)
    reports = [*training.updates(dataset(torch.float64), epochs=2)]
    assert [(report.phase, len(reports)) for report in reports] == [(n, 18) for n, _ in expected]
    for report, (name, loss) in zip(reports, expected, strict=True):
        assert report.loss == report.metrics[f"{name}/loss"] == pytest.approx(loss, abs=1e-12)
        assert ("d/right" in report.metrics) == (name == "d")
        assert (report.grad_norm is None) == (name == "g")
    assert [r.lr for r in reports if r.phase == "g"] == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]
    for key, value in plain.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(
                training.model.state_dict()[key], value, rtol=0, atol=1e-9, msg=key
            )


def test_a_quorum_of_each_update_is_that_of_a_plain_loop() -> None:
    """Three workers, of which another one is late in each update, in both phases."""
    torch.manual_seed(5)
    ours = {name: each.double() for name, each in models().items()}
    plain = nn.ModuleDict(copy.deepcopy(ours))
    training = trainer(
        model=ours,
        update="quorum:2",
        shards=3,
        devices=["cpu"] * 3,
        workers=quorate.Workers(engine="towers"),
    )

    def time_s(worker: int, step: int, _shard: int) -> float:
        return 1.0 + (worker + step + step // 3) % 3

    with in_memory(time_s=time_s) as happened:
        reports = [*training.updates(dataset(torch.float64), epochs=2)]
    kept: list[list[int]] = [[] for _ in reports]
    for entry in happened:
        if isinstance(entry, Keep):
            kept[entry.step] += range(entry.shard, entry.shard + entry.count)
    kept = [sorted(shards) for shards in kept]
    assert {len(shards) for shards in kept} == {2}
    for phase in ("d", "g"):  # late was now this worker and now that one
        of_phase = [s for s, r in zip(kept, reports, strict=True) if r.phase == phase]
        assert len({tuple(shards) for shards in of_phase}) > 1
    assert all(report.dropped_rows > 0 for report in reports)
    expected = plain_loop(plain, 2, kept)
    for report, (name, loss) in zip(reports, expected, strict=True):
        assert (report.phase, report.loss) == (name, pytest.approx(loss, abs=1e-12))
    for key, value in plain.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(
                training.model.state_dict()[key], value, rtol=0, atol=1e-9, msg=key
            )


def test_one_digest_on_towers_and_after_a_resume_between_two_phases(tmp_path: Path) -> None:
    losses = [("d", d_loss), ("d", d_loss), ("g", noisy_g_loss)]
    found = {}
    for workers in (1, 2, 3):
        whole = trainer(losses, shards=4, devices=["cpu"] * workers)
        whole.fit(dataset(), epochs=2)
        found[workers] = digest_of(whole)
    options = {"shards": 4, "run_dir": tmp_path / "run"}
    trainer(losses, devices=["cpu"] * 3, **options).fit(dataset(), steps=10)  # a d of the second
    resumed = trainer(losses, devices=["cpu"] * 2, **options)
    resumed.fit(dataset(), epochs=2)
    assert {*found.values(), digest_of(resumed)} == {found[1]}


def test_what_a_round_leaves_alone() -> None:
    """A phase changes what it trains, and others' parameters want a gradient again after it."""
    training = trainer([("d", d_loss), ("g", g_loss)])
    before = {name: copy.deepcopy(each.state_dict()) for name, each in training.model.items()}  # type: ignore[operator]
    for report in training.updates(dataset(), steps=4):
        assert report.phase is not None
        for name, each in training.model.items():  # type: ignore[operator]
            now = each.state_dict()
            is_other = [
                not torch.equal(now[k], before[name][k]) for k, _ in each.named_parameters()
            ]
            assert all(is_other) if name == report.phase else not any(is_other)
            before[name] = copy.deepcopy(now)
        assert all(p.requires_grad for p in training.model.parameters())
    averaged = training.averaged_model
    assert averaged is not None
    for key, value in averaged.state_dict().items():
        same = torch.equal(value, training.model.state_dict()[key])
        assert same != (key.startswith("g.") and "norm.running" not in key and "num" not in key)


def test_a_phase_computes_no_gradient_for_others() -> None:
    seen: dict[str, set[bool]] = {}

    def looking(name: str, loss: Any) -> Any:
        def look(model: nn.ModuleDict, batch: Any) -> Any:
            wants = tuple(next(model[n].parameters()).requires_grad for n in ("g", "d"))
            seen.setdefault(name, set()).add(wants)  # type: ignore[arg-type]
            return loss(model, batch)

        return look

    training = trainer({"d": looking("d", d_loss), "g": looking("g", g_loss)})
    [*training.updates(dataset(), steps=4)]
    assert seen["d"] == {(True, True), (False, True)}  # both, while it is tried
    assert seen["g"] == {(True, True), (True, False)}


def test_phases_that_train_several_parts_or_the_same(tmp_path: Path) -> None:
    def warm(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        return (model["g"](batch[1]) - batch[0]).square().mean()

    def both(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        return g_loss(model, batch) + d_loss(model, batch)["loss"]

    losses = [
        quorate.Phase("warm", warm, trains="g"),
        quorate.Phase("both", both, trains=("g", "d")),
        quorate.Phase("g", g_loss, new_batch=True),
    ]

    def made(workers: int, run_dir: Path | None = None) -> quorate.Trainer:
        return trainer(losses, optimizer=adam, devices=["cpu"] * workers, run_dir=run_dir)

    whole = made(1)
    reports = [*whole.updates(dataset(), epochs=1)]
    assert [r.phase for r in reports] == ["warm", "both", "g"] * 3
    assert whole.updates_per_epoch(dataset(), "g") == 3
    for steps in (4, 9):  # each phase has moments of its own for what several train
        last = made(2, tmp_path / "run")
        last.fit(dataset(), steps=steps)
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, last.model.state_dict()[key]), key


def test_parts_of_one_module() -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleDict(models())

    def of(loss: Any) -> Any:
        return lambda model, batch: loss(model.nets, batch)

    losses = [
        quorate.Phase("d", of(d_loss), trains="nets.d"),
        quorate.Phase("g", of(g_loss), trains=["nets.g"]),
    ]
    training = trainer(losses, model=Gan)
    training.fit(dataset(), steps=3)
    assert training.global_step == 3


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


def test_a_schedule_by_a_metric_of_a_phase() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, patience=0)

    optimizer = {
        "d": quorate.Optimize(sgd, schedule=plateau, schedule_metric="validation/d/loss"),
        "g": quorate.Optimize(adam, schedule=plateau, schedule_metric="loss"),
    }
    training = trainer(optimizer=optimizer)
    rates: dict[str, list[float]] = {"d": [], "g": []}

    class Rates(quorate.Callback):
        def updated(self, report: quorate.Report) -> None:
            rates[str(report.phase)].append(report.lr)

    training.fit(dataset(), epochs=4, validation=dataset(), callbacks=[Rates()])
    assert min(rates["g"]) < 0.01
    assert len(set(rates["d"][:6])) == 1  # once per epoch, of 6
    with pytest.raises(SettingError, match="schedule_metric: got 'validation/d/loss'"):
        trainer(optimizer=optimizer).fit(dataset())


def test_an_update_that_is_not_finite_counts_for_its_phase(tmp_path: Path) -> None:
    def spoilt(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = g_loss(model, batch)
        return loss * float("inf") if (batch[1][:, 0] > 2.0).any() else loss

    optimizer = {
        "d": sgd,
        "g": quorate.Optimize(adam, schedule=halved, nonfinite="skip"),
    }
    losses = {"d": d_loss, "g": spoilt}

    def made(path: Path, workers: int) -> quorate.Trainer:
        devices = ["cpu"] * workers
        return trainer(losses, optimizer=optimizer, run_dir=path, devices=devices, shards=4)

    whole = made(tmp_path / "whole", 1)
    whole.fit(dataset(), epochs=2)
    for steps in (13, 24):
        parts = made(tmp_path / "parts", 2)
        parts.fit(dataset(), steps=steps)
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[key]), key
    log = (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert '"not_finite": 1' in log
    assert '"phase": "g"' in log
    with pytest.raises(quorate.QuorateError, match=r"gradient of g\.first\.weight.*not finite"):
        trainer(losses, optimizer=sgd).fit(dataset(), epochs=2)


def test_what_is_saved_is_shown_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path / "run"}
    first = trainer(**options)
    first.fit(dataset(), steps=5)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "d: 4 updates, SGD, clip_norm 0.2" in shown
    assert "g: 1 updates, Adam, StepLR, ema_decay 0.9" in shown
    fresh = nn.ModuleDict(models())
    quorate.load_weights(fresh, tmp_path / "run")
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, first.model.state_dict()[key])
    others = [
        ({"d": d_loss, "g": g_loss}, OPTIMIZERS, "trained with round="),
        (LOSSES, {**OPTIMIZERS, "d": adam}, "d: SGD, g: Adam, and this run has d: Adam, g: Adam"),
    ]
    for loss, optimizer, said in others:
        with pytest.raises(CheckpointError, match=said):
            trainer(loss, optimizer=optimizer, **options).fit(dataset(), steps=9)
    clipped = {**OPTIMIZERS, "d": quorate.Optimize(sgd, clip_norm=0.5)}
    trainer(optimizer=clipped, **options).fit(dataset(), steps=6)
    assert "clip_norm of phase d was 0.2 and is 0.5" in capsys.readouterr().out


def of_other_names(forged: Forged) -> None:
    tensors = forged.unpack("optimizer.safetensors")
    shapes = {name.replace("d/", "e/", 1): value for name, value in tensors.items()}
    forged.repack("optimizer.safetensors", shapes)


def of_the_other(forged: Forged) -> None:
    groups = [phase["optimizer_groups"] for phase in forged.record["phases"]]
    groups[0][0]["names"][0] = groups[1][0]["names"][0]


@pytest.mark.slow
def test_compiled_losses(capsys: pytest.CaptureFixture[str]) -> None:
    compute = quorate.Compute(compile=True)
    options: dict[str, Any] = {"shards": 2, "compute": compute, "precision": "fp32"}
    found = set()
    for workers in (1, 2):
        training = trainer(devices=["cpu"] * workers, **options)
        training.fit(dataset(), steps=4)
        found.add(digest_of(training))
    assert "compile is off" not in capsys.readouterr().out
    assert len(found) == 1


FORGERIES: dict[str, tuple[Callable[[Forged], object], str]] = {
    "no phases": (lambda f: f.record.pop("phases"), "other phases"),
    "no round": (lambda f: f.record.pop("round"), "an epoch has 6 steps"),
    "an order": (lambda f: f.record["phases"].reverse(), "other phases"),
    "one twice": (lambda f: f.record["phases"].append(f.record["phases"][0]), "other phases"),
    "a count": (lambda f: f.record["phases"][0].update(updates=3), "updates of all phases"),
    "a kind": (lambda f: f.record["phases"][0].update(optimizer="Adam"), "got optimizer="),
    "batches": (lambda f: f.record["round"].update(takes=[0, 2, 2]), "got a round that is none"),
    "no batches": (lambda f: f.record["round"].update(takes=[]), "got a round that is none"),
    "a schedule": (lambda f: f.record["phases"][1].update(schedule_state={"dict": []}), "schedule"),
    "an average": (lambda f: f.record["phases"][1].update(ema_decay=None), "ema_decay=None"),
    "a phase": (lambda f: f.record["phases"][0].update(odd=1), "unknown field"),
    "names of tensors": (of_other_names, "is of no phase"),
    "a parameter of another": (of_the_other, "which is no trainable parameter"),
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
    forged = Forged(checkpoint_of(run_dir, 8), random.Random(0))
    change, why = FORGERIES[name]
    change(forged)
    forged.write()
    trainer(run_dir=run_dir).fit(dataset(), steps=9)
    said = capsys.readouterr().out
    (passed_over,) = [line for line in said.splitlines() if line.startswith("passed over: ")]
    assert why in passed_over
    assert "a round of updates is d, d, g, on 2 batches; an epoch has 9 updates" in said
    assert "resumed step 4 " in said
    assert main(["inspect", str(run_dir)]) == 0


def penalised(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
    """A loss with a gradient penalty, as of WGAN-GP."""
    real, fake = batch[0], model["g"](batch[1])
    loss = model["d"](fake).mean() - model["d"](real).mean()
    if torch.is_grad_enabled():
        between = torch.lerp(real, fake, torch.rand(len(real), 1)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(model["d"](between).sum(), between, create_graph=True)
        loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
    return loss  # type: ignore[no-any-return]


def test_a_gradient_penalty_and_clipped_weights() -> None:
    class Clip(quorate.Callback):
        def updated(self, report: quorate.Report) -> None:
            if report.phase == "d":
                with torch.no_grad():
                    for parameter in training.model.get_submodule("d").parameters():
                        parameter.clamp_(-0.05, 0.05)

    found = set()
    for workers in (1, 2):
        training = trainer({"d": penalised, "g": g_loss}, devices=["cpu"] * workers, shards=4)
        training.fit(dataset(), steps=6, validation=dataset(), callbacks=[Clip()])
        largest = max(p.abs().max().item() for p in training.model.get_submodule("d").parameters())
        assert largest == pytest.approx(0.05)
        found.add(digest_of(training))
    assert len(found) == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": {}}, "loss: got 'no phase'"),
    ({"loss": [d_loss, g_loss]}, "expected a function, a dict from phases"),
    (
        {"loss": {"d": d_loss, "e": g_loss}, "optimizer": sgd},
        "trains of phase 'e': got 'e', expected a part of the",
    ),
    ({"loss": {"d": d_loss}, "optimizer": sgd}, "no phase for g.first.weight"),
    ({"loss": [("d", d_loss), ("d", g_loss)], "optimizer": sgd}, "two phases 'd'"),
    ({"loss": {"d.x": d_loss}}, "a printable text without"),
    ({"loss": {"d": d_loss, "g": 3}}, "loss 'g': got 'int'"),
    ({"loss": {"d": d_loss, "g": lambda model: model}}, "loss 'g'"),
    ({"optimizer": {"d": sgd}}, "optimizer: got 'd', expected one for each phase: d, g"),
    ({"loss": g_loss}, "as there is one loss"),
    ({"update": "async"}, "expected sync or quorum:R, as the loss has phases"),
    ({"update": "bounded:2"}, "expected sync or quorum:R, as the loss has phases"),
    ({"workers": quorate.Workers(engine="ray", servers=2)}, "servers"),
    ({"model": {"g": Generator, "d": 3}}, "model 'd': got 'int'"),
    ({"model": {}}, "model: got 'an empty dict'"),
    ({"model": {"keys": Generator}}, "names as attributes"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError) as raised:
        trainer(**options)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_refused_when_training_begins() -> None:
    lbfgs = {"d": torch.optim.LBFGS, "g": adam}
    with pytest.raises(SettingError, match="LBFGS in phase 'd'\", expected optimizers that step"):
        trainer(optimizer=lbfgs).fit(dataset())
    with pytest.raises(SettingError, match="expected batches enough for phase 'g'"):
        trainer(batch_size=ROWS).fit(dataset())

    def of_the_other(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        return model["d"](batch[0]).mean()  # type: ignore[no-any-return]

    with pytest.raises(LossError, match="no gradient") as raised:
        trainer({"d": d_loss, "g": of_the_other}).fit(dataset())
    assert "(phase g)" in "".join(raised.value.__notes__)
    heavy = {"d": lambda m, b: {**d_loss(m, b), "weight": 3}, "g": g_loss}
    with pytest.raises(LossError, match="expected the same of each"):
        trainer(heavy).fit(dataset())
