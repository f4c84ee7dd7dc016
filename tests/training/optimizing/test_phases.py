"""Several models in one training: beside a plain loop, and what a round does and leaves alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest_of
from support.gan import (
    OPTIMIZERS,
    ROWS,
    adam,
    d_loss,
    dataset,
    g_loss,
    halved,
    models,
    sgd,
    trainer,
)
from support.messages import expect_error
from torch import nn

import quorate
from quorate.coordination.plan import Plan
from quorate.coordination.protocol import Keep
from quorate.errors import SettingError
from quorate.testing import in_memory


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
    with expect_error(SettingError, name="schedule_metric"):
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
    with expect_error(quorate.QuorateError):
        trainer(losses, optimizer=sgd).fit(dataset(), epochs=2)


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
