"""Several optimizers in each update: plain loops of several steps, refusals, checkpoints."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest
from support.fits import Calls, fit, rows
from support.messages import expect_error
from support.plain_loop import assert_close
from torch import nn, optim
from torch.utils.data import TensorDataset

import quorate
from quorate.__main__ import main
from quorate.errors import CheckpointError, SettingError


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(layers, nn.LayerNorm(16), nn.Linear(16, 1)).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    return TensorDataset(*(each.to(dtype) for each in rows(32).tensors))


def squares(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def step_lr(optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler:
    return optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("0.") and parameter.ndim == 2


def by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    groups = [[each for each in named_parameters if ("1." in each[0]) == norm] for norm in (0, 1)]
    decays = ({"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 3e-3})
    return optim.AdamW([{"params": g, **d} for g, d in zip(groups, decays, strict=True)], lr=1e-2)


muon = partial(optim.Muon, lr=0.02)
sgd = partial(optim.SGD, lr=0.05, momentum=0.9)
# pattern, optimizer, schedule, clip_norm; the parameters of each
FLAGSHIP: list[Any] = [(is_matrix, muon, step_lr), ("*", by_name)]
CLIPPED: list[Any] = [("2", sgd, None, 0.3), (is_matrix, sgd, step_lr, 0.02), ("*", by_name)]


def plain(entries: list[Any], model: nn.Module, steps: int, clip_norm: float | None = None) -> None:
    """Train as a loop with one ``backward`` and several ``step`` calls."""
    left = dict(model.named_parameters())
    made = []
    for choice, make, schedule, clip in ((*each, None, None)[:4] for each in entries):
        is_own = choice if callable(choice) else lambda n, _, c=choice: c == "*" or n[:2] == f"{c}."
        own = {n: p for n, p in left.items() if is_own(n, p)}
        left = {n: p for n, p in left.items() if n not in own}
        optimizer = make([*own.items()])
        made.append((optimizer, [*own.values()], schedule and schedule(optimizer), clip))
    assert not left
    batches = data(next(model.parameters()).dtype)
    for step in range(steps):
        start = 8 * step % 32
        model.zero_grad()
        squares(model, [*batches[start : start + 8]]).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for _, own, _, clip in made:
            if clip is not None:
                nn.utils.clip_grad_norm_(own, clip)
        for optimizer, _, schedule, _ in made:
            optimizer.step()
            if schedule is not None:
                schedule.step()


OPTIONS: dict[str, Any] = {"shuffle": False, "engine": "towers", "batch_size": 8}


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    ("entries", "shards", "clip_norm"), [(FLAGSHIP, 1, None), (CLIPPED, 4, None), (CLIPPED, 3, 0.5)]
)
def test_a_plain_loop_of_several_steps(
    entries: list[Any],
    shards: int,
    clip_norm: float | None,
    dtype: torch.dtype,
    most: float,
    tmp_path: Path,
) -> None:
    expected = net(dtype)
    plain(entries, expected, 12, clip_norm)
    options = {**OPTIONS, "optimizer": entries, "shards": shards, "clip_norm": clip_norm}
    whole = fit(net(dtype), squares, data(dtype), steps=12, workers=1, **options)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=most, msg=name)
    for workers, steps in ((2, 5), (3, 12)):
        options |= {"run_dir": tmp_path, "summary_every_s": None}
        last = fit(net(dtype), squares, data(dtype), steps=steps, workers=workers, **options)
    assert digest(last.model.state_dict().items()) == digest(whole.model.state_dict().items())


SECOND = (0.01, 0.01, 0.5, 0.25)  # learning rates of an optimizer, one set by a callback


def test_each_optimizer_has_its_rate_and_its_groups(tmp_path: Path) -> None:
    plateau = partial(optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9)
    entries = [("0", sgd, plateau), ("*", by_name)]
    seen: list[list[float]] = []

    def updated(trainer: quorate.Trainer, report: quorate.Report) -> None:
        seen.append(report.lrs)
        groups = trainer.param_groups
        assert [len(g["params"]) > 0 for g in groups] == [True] * 3
        assert groups[2]["param_names"] == ["1.weight", "1.bias"]
        if report.global_step == 2:
            groups[1]["lr"] = 0.5
        assert report.lr == report.lrs[0]

    options = {**OPTIONS, "schedule": step_lr, "schedule_metric": "loss", "run_dir": tmp_path}
    fit(net(), squares, data(), steps=4, optimizer=entries, callbacks=[Calls(updated)], **options)
    # The schedule of all optimizers is for the second alone.
    assert seen == [[pytest.approx(0.05 / 10**n), rate] for n, rate in enumerate(SECOND)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["lrs"] for line in lines] == seen


def test_an_update_that_is_not_finite_is_made_by_none() -> None:
    most = data().tensors[0][:, 0].max()

    def spoilt(model: Any, batch: list[torch.Tensor]) -> torch.Tensor:
        is_bad = bool((batch[0][:, 0] == most).any())
        return squares(model, batch) + (float("nan") * model[2].bias.sum() if is_bad else 0.0)

    trainer = quorate.Trainer(
        net, spoilt, optimizer=quorate.Optimize(CLIPPED, nonfinite="skip"), batch_size=8, shards=2
    )
    seen, before = [0], [p.clone() for p in trainer.model.parameters()]
    for report in trainer.updates(data(), steps=8, shuffle=False):
        same = [torch.equal(*each) for each in zip(trainer.model.parameters(), before, strict=True)]
        seen.append(report.not_finite)
        assert same == [seen[-1] > seen[-2]] * 8
        before = [p.clone() for p in trainer.model.parameters()]
    assert seen[-1] == 2


def test_tables_by_rows_have_an_optimizer_of_their_own() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1))

    words = TensorDataset(torch.arange(96).reshape(32, 3) % 50, rows(32).tensors[1])
    entries = [("0", optim.SparseAdam, None, 0.1), ("*", partial(optim.Adam, lr=0.01), None, 0.2)]
    found = [
        fit(made, squares, words, steps=6, workers=n, optimizer=entries, **OPTIONS) for n in (1, 3)
    ]
    assert len({digest(each.model.state_dict().items()) for each in found}) == 1
    expected = made()
    own = [*expected.parameters()]
    optimizers = [optim.SparseAdam(own[:1]), optim.Adam(own[1:], lr=0.01)]
    for step in range(6):
        expected.zero_grad()
        squares(expected, [*words[8 * step % 32 : 8 * step % 32 + 8]]).backward()
        nn.utils.clip_grad_norm_(own[1:], 0.2)
        own[0].grad = own[0].grad.coalesce()  # type: ignore[union-attr]
        own[0].grad *= min(1.0, 0.1 / (own[0].grad.values().norm().item() + 1e-6))
        for optimizer in optimizers:
            optimizer.step()
    assert_close(found[0].model, expected)


REFUSED: list[tuple[Any, str, object]] = [
    ([], "optimizer", "an empty list"),
    ([sgd], "optimizer 0", "partial"),
    ([("*", sgd, None, None, 1)], "optimizer 0", "5 values"),
    ([("*", 3)], "optimizer 0: optimizer", "int"),
    ([(3, sgd)], "optimizer 0: pattern", "int"),
    ([("*", sgd), (lambda name: True, sgd)], "optimizer 1: pattern", "<lambda>(name)"),
    ([("*", sgd, None, -1)], "optimizer 0: clip_norm", -1),
    ([("*", sgd, 3)], "optimizer 0: schedule", "int"),
    ((("*", sgd),), "optimizer", "tuple"),
    ([("0", sgd)], "optimizer", "no entry for 1.weight, 1.bias, 2.weight, 2.bias"),
    ([("*", sgd), ("2", sgd)], "optimizer", "no parameter for entry 1, '2'"),
    ([("3", sgd), ("*", sgd)], "optimizer", "no parameter for entry 0, '3'"),
    ([("0", optim.LBFGS), ("*", sgd)], "optimizer", "LBFGS for '0'"),
    ([(nn.Linear(1, 1), sgd)], "optimizer 0: pattern", "a module, Linear"),
    ([(lambda name, p: p > 0, sgd)], "optimizer", "a Tensor from <lambda> for 0.0.weight"),
]


def test_servers_refuse_a_list() -> None:
    with expect_error(SettingError, name="servers", got=2):
        fit(net, squares, data(), optimizer=CLIPPED, **{**OPTIONS, "engine": "ray", "servers": 2})


@pytest.mark.parametrize(("entries", "name", "got"), REFUSED, ids=range(len(REFUSED)))
def test_refused_in_one_line(entries: Any, name: str, got: object) -> None:
    with expect_error(SettingError, name=name, got=got) as raised:
        fit(net, squares, data(), steps=1, optimizer=entries, **OPTIONS)
    assert "\n" not in str(raised.value)


def test_what_is_saved_is_shown_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**OPTIONS, "run_dir": tmp_path}
    fit(net, squares, data(), steps=2, optimizer=CLIPPED, **options)
    assert main(["inspect", "--all", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for line in ("SGD, clip_norm 0.3\n", "SGD, StepLR, clip_norm 0.02\n", "AdamW\n"):
        assert f" {line}" in shown
    for entries in (sgd, FLAGSHIP, CLIPPED[1:], [("2.weight", sgd), *CLIPPED[1:]]):
        with expect_error((CheckpointError, SettingError)):  # type: ignore[arg-type]
            fit(net, squares, data(), steps=4, optimizer=entries, **options)
    other = [("2", partial(sgd, lr=0.1), None, 0.4), *CLIPPED[1:]]
    trainer = fit(net, squares, data(), steps=4, optimizer=other, **options)
    said = capsys.readouterr().out
    assert "clip_norm of optimizer 0 was 0.3 and is 0.4" in said
    assert "lr of parameter group 0 of optimizer 0 was 0.05 and is 0.1 in the script" in said
    assert [group["lr"] for group in trainer.param_groups] == [0.1, 0.025, 1e-2, 3e-3]


class Named(optim.Adam):
    def __init__(self, named_parameters: Any, lr: float = 1e-2) -> None:
        self.first = named_parameters[0][0]
        super().__init__(named_parameters, lr=lr)

    @classmethod
    def make(cls, named_parameters: Any) -> Named:
        return cls(named_parameters, lr=2e-2)


@pytest.mark.parametrize("make", [by_name, partial(Named, lr=0.03), Named.make, Named])
def test_an_optimizer_function_may_receive_names(make: Any, tmp_path: Path) -> None:
    expected = net()
    plain([("*", make)], expected, 8)
    options = {**OPTIONS, "optimizer": make, "run_dir": tmp_path}
    for workers, steps in ((1, 3), (2, 8)):
        trainer = fit(net, squares, data(), steps=steps, workers=workers, **options)
    assert_close(trainer.model, expected, 1e-12)
    names = [name for group in trainer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(dict(net().named_parameters()))
