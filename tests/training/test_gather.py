"""Losses over the whole batch: equal to a batch in one piece, with the same bits on any workers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest_of
from support.messages import expect_error
from support.warm import WARM
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.coordination.plan import Plan
from quorate.errors import LossError, NotFiniteError, SettingError
from quorate.replica.witness.data_writes import names_data
from quorate.replica.witness.kept import kept_by

SCRIPT = Path(__file__).parents[1] / "scripts" / "gathered.py"
_spec = importlib.util.spec_from_file_location("gathered", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)

# Dropout would differ: its random numbers are a shard's. LayerNorm normalises each row by itself.
Plain = partial(script.Encoder, 0.0, nn.LayerNorm)


def trainer(
    model: Callable[[], nn.Module] = script.Encoder,
    workers: int = 1,
    engine: str = "towers",
    servers: int | None = None,
    **options: Any,
) -> quorate.Trainer:
    defaults: dict[str, Any] = {
        "loss": quorate.Gather(script.represent, script.contrast),
        "optimizer": quorate.Optimize(
            lambda params: torch.optim.Adam(params, lr=0.01), ema_decay=0.9
        ),
        "workers": quorate.Workers(workers, engine=engine, servers=servers),
        "compute": quorate.Compute(spot_check_every=0),
    }
    return quorate.Trainer(
        model, batch_size=script.BATCH, shards=options.pop("shards", script.SHARDS), seed=0,
        devices="cpu", **defaults | options,
    )  # fmt: skip


def batches(plan: Plan, steps: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """The rows of each step, in the order of its shards."""
    found = []
    for step in range(steps):
        shards = [plan.shard(step, shard) for shard in range(plan.shards_of(step))]
        rows = torch.cat([torch.as_tensor(list(shard)) for shard in shards])
        found.append([view[rows].to(dtype) for view in script.data().tensors])
    return found


def wide_data(dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(*(view.to(dtype) for view in script.data().tensors))


@pytest.mark.parametrize(
    ("dtype", "shards", "bound"),
    [(torch.float64, 5, 1e-12), (torch.float32, 5, 1e-6), (torch.float64, 1, 1e-12)],
)
def test_value_and_gradient_are_those_of_one_whole_batch(
    dtype: torch.dtype, shards: int, bound: float
) -> None:
    """By SGD with a rate of 1: what parameters change by is the gradient, the temperature's too."""
    ours = trainer(
        lambda: Plain().to(dtype),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        shards=shards,
    )
    plan = Plan(rows=script.ROWS, batch_size=script.BATCH, shards=shards, seed=0)
    before = Plain().to(dtype).state_dict()
    for report, batch in zip(
        ours.updates(wide_data(dtype), steps=3), batches(plan, 3, dtype), strict=True
    ):
        model = Plain().to(dtype)
        model.load_state_dict(before)
        returned = script.contrast(model, script.represent(model, batch))
        returned["loss"].backward()
        assert report.metrics["loss"] == pytest.approx(returned["loss"].item(), abs=bound)
        assert report.metrics["accuracy"] == pytest.approx(returned["accuracy"].item(), abs=1e-7)
        before = {name: value.clone() for name, value in ours.model.state_dict().items()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            expected = parameter.detach() - parameter.grad
            torch.testing.assert_close(before[name], expected, rtol=0, atol=bound)


def test_a_loss_of_single_shards_is_another_one() -> None:
    """Else the test above would show nothing."""
    plan = Plan(rows=script.ROWS, batch_size=script.BATCH, shards=script.SHARDS, seed=0)
    (batch,) = batches(plan, 1, torch.float32)
    whole = script.contrast(model := Plain(), script.represent(model, batch))["loss"]
    within = trainer(Plain, loss=quorate.Gather(script.represent, script.contrast).__call__)
    report = next(iter(within.updates(script.data(), steps=1)))
    assert abs(report.metrics["loss"] - whole.item()) > 0.5


def test_one_digest_on_any_number_of_workers_and_after_a_resume(tmp_path: Path) -> None:
    first = trainer()
    first.fit(script.data(), steps=script.STEPS)
    expected = digest_of(first)
    for workers in (2, 3):
        other = trainer(workers=workers)
        other.fit(script.data(), steps=script.STEPS)
        assert digest_of(other) == expected
    trainer(workers=3, run_dir=tmp_path).fit(script.data(), steps=4)  # in mid-epoch
    resumed = trainer(workers=2, run_dir=tmp_path)
    resumed.fit(script.data(), steps=script.STEPS)
    assert digest_of(resumed) == expected


def test_buffers_count_once() -> None:
    """They are those of a loss of single shards, which computes each shard once."""

    def statistics(loss: Any) -> dict[str, torch.Tensor]:
        ours = trainer(loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        ours.fit(script.data(), steps=4)
        return dict(ours.model.named_buffers())

    def alone(model: nn.Module, batch: Any) -> Any:
        return script.contrast(model, script.represent(model, batch))

    ours = statistics(quorate.Gather(script.represent, script.contrast))
    assert ours.keys() == {
        f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    for name, expected in statistics(alone).items():
        assert torch.equal(ours[name], expected)


def test_rows_are_loaded_once_and_represented_twice() -> None:
    loaded, represented = [0], [0]

    class Counted(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            loaded[0] += 1
            return super().__getitem__(index)

        __getitems__ = None  # row by row

    def represent(model: nn.Module, batch: Any) -> Any:
        represented[0] += 1
        batch[0].mul_(1.0)  # user code may write what it is given
        return script.represent(model, batch)

    def counts(steps: int) -> tuple[int, int]:
        loaded[0], represented[0] = 0, 0
        ours = trainer(loss=quorate.Gather(represent, script.contrast))
        ours.fit(Counted(*script.data().tensors), steps=steps)
        return loaded[0], represented[0]

    one, two = counts(1), counts(2)
    # Were they loaded again, there would be twice as many; some are loaded ahead and never wanted.
    assert two[0] - one[0] < 1.5 * script.BATCH
    assert two[1] - one[1] == 2 * script.SHARDS


def test_an_evaluation_is_over_whole_batches() -> None:
    ours = trainer(Plain, workers=2)
    ours.fit(script.data(), steps=2)
    for averaged, model in ((False, ours.model), (True, ours.averaged_model)):
        assert model is not None
        model.eval()
        loss, weight = 0.0, 0
        for start in range(0, script.ROWS, script.BATCH):
            rows = [view[start : start + script.BATCH] for view in script.data().tensors]
            returned = script.contrast(model, script.represent(model, rows))
            loss += returned["loss"].item() * len(rows[0])
            weight += len(rows[0])
        found = ours.evaluate(script.data(), averaged=averaged)
        assert found is not None
        assert found["loss"] == pytest.approx(loss / weight, abs=1e-6)


def test_labels_are_gathered_and_counts_are_summed() -> None:
    """A supervised loss: a dict of representations, of which the labels have no gradient."""
    labels = torch.arange(script.ROWS) % 3
    dataset = TensorDataset(*script.data().tensors, labels)

    def represent(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        one, other = script.represent(model, batch[:2])
        return {"z": one, "teacher": other.detach(), "label": batch[2]}

    def contrast(model: nn.Module, rows: dict[str, torch.Tensor]) -> dict[str, Any]:
        assert not rows["label"].requires_grad
        likeness = rows["z"] @ rows["teacher"].T
        same = rows["label"][:, None] == rows["label"]
        loss = (F.log_softmax(likeness, dim=1) * same).sum(1).neg().mean()
        return {"loss": loss, "pairs": same.sum()}

    def reports(workers: int) -> list[quorate.Report]:
        ours = trainer(
            workers=workers,
            loss=quorate.Gather(represent, contrast),
            totals={"pairs": lambda total: {"pairs": float(total)}},
        )
        return list(ours.updates(dataset, steps=3))

    one, two = reports(1), reports(2)
    assert [r.metrics for r in one] == [r.metrics for r in two]
    plan = Plan(rows=script.ROWS, batch_size=script.BATCH, shards=script.SHARDS, seed=0)
    rows = [torch.as_tensor(list(plan.shard(0, shard))) for shard in range(script.SHARDS)]
    own = labels[torch.cat(rows)]
    assert one[0].metrics["pairs"] == float((own[:, None] == own).sum())


@pytest.mark.parametrize(
    ("name", "got", "options"),
    [
        ("update", "async", {"update": "async"}),
        ("update", "quorum:2", {"update": "quorum:2"}),
        ("compile", True, {"compute": quorate.Compute(compile=True)}),
        ("servers", 1, {"workers": 2, "engine": "ray", "servers": 1}),
    ],
)
def test_what_has_no_whole_batch_is_refused(
    name: str, got: object, options: dict[str, Any]
) -> None:
    with expect_error(SettingError, name=name, got=got):
        trainer(**options)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with expect_error(SettingError, name="optimizer", got="LBFGS"):
        trainer(optimizer=torch.optim.LBFGS).fit(script.data(), steps=1)


def no_rows(model: nn.Module, batch: Any) -> Any:
    return script.represent(model, batch)[0].mean()


def of_single_rows(model: nn.Module, batch: Any) -> Any:
    return [z[:, : len(z)] for z in script.represent(model, batch)]


def normalises(model: nn.Module, views: Any) -> torch.Tensor:
    return F.mse_loss(model.body[1](views[0].repeat(1, 4)), views[1].repeat(1, 4))


def is_detached(model: nn.Module, views: Any) -> torch.Tensor:
    return views[0].detach().mean() * model.log_temperature


@pytest.mark.parametrize(
    ("represent", "contrast"),
    [
        (no_rows, script.contrast),
        (of_single_rows, lambda _, views: views[0].sum()),
        (script.represent, normalises),
        (script.represent, is_detached),
        (script.represent, lambda _, views: views[0]),
    ],
    ids=["no rows", "rows by rows", "writes a buffer", "is detached", "no scalar"],
)
def test_mistakes_are_said_in_a_line(represent: Any, contrast: Any) -> None:
    with expect_error(LossError):
        trainer(loss=quorate.Gather(represent, contrast)).fit(script.data(), steps=1)


def test_what_contrast_raises_is_raised_with_its_step() -> None:
    def contrast(model: nn.Module, views: Any) -> Any:
        if len(views[0]) == script.BATCH:
            raise ValueError("as a whole")
        return script.contrast(model, views)

    with pytest.raises(ValueError, match="as a whole") as raised:
        trainer(loss=quorate.Gather(script.represent, contrast)).fit(script.data(), steps=1)
    assert raised.value.__notes__[0] == "quorate: in contrast, of the whole batch of step 0"


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_finite_makes_no_update(nonfinite: str) -> None:
    def contrast(model: nn.Module, views: Any) -> Any:
        returned = script.contrast(model, views)
        if len(views[0]) == script.BATCH:
            returned["loss"] = returned["loss"] / 0.0
        return returned

    ours = trainer(
        loss=quorate.Gather(script.represent, contrast),
        optimizer=quorate.Optimize(torch.optim.Adam, nonfinite=nonfinite),
    )
    if nonfinite == "stop":
        with expect_error(NotFiniteError):
            ours.fit(script.data(), steps=1)
    else:
        reports = list(ours.updates(script.data(), steps=3))
        assert [report.not_finite for report in reports] == [1, 2, 2]  # the last has fewer rows


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_the_loss_is_computed_in_32(precision: str) -> None:
    seen = set()

    def contrast(model: nn.Module, views: Any) -> Any:
        seen.add(views[0].dtype)
        return script.contrast(model, views)

    losses = []
    for workers in (1, 2):
        ours = trainer(
            workers=workers,
            precision=precision,
            loss=quorate.Gather(script.represent, contrast),
        )
        losses.append([r.metrics["loss"] for r in ours.updates(script.data(), steps=6)])
    assert losses[0] == losses[1]
    wide = [r.metrics["loss"] for r in trainer().updates(script.data(), steps=6)]
    assert losses[0] == pytest.approx(wide, abs=0.05)
    assert seen == {torch.float32}


seen: dict[str, torch.Tensor] = {}


def keeps(model: nn.Module, batch: Any) -> Any:
    views = script.represent(model, batch)
    seen["last"] = views[0].detach()
    return views


def writes_data(model: nn.Module, views: Any) -> Any:
    model.log_temperature.data.mul_(1.0)  # type: ignore[union-attr, operator]
    return script.contrast(model, views)


def test_what_its_functions_share_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    ours = trainer(workers=2, loss=quorate.Gather(keeps, script.contrast))
    ours.fit(script.data(), steps=1)
    assert (
        "workers compute one at a time, because a shard writes to 'seen' in keeps"
        in capsys.readouterr().out
    )
    count = [0]

    def counted(model: nn.Module, views: Any) -> Any:
        count[0] += 1
        returned = script.contrast(model, views)
        return {**returned, "loss": returned["loss"] * (1 + 0.1 * count[0])}

    assert names_data(nn.Linear(1, 1), quorate.Gather(script.represent, writes_data))
    assert not names_data(nn.Linear(1, 1), quorate.Gather(script.represent, script.contrast))
    for gather in (quorate.Gather(counted, counted), counted):
        assert any("'count'" in name for name in kept_by(gather, nn.Linear(1, 1)))


def ended(*words: str) -> tuple[str, str]:
    code, out, err = WARM.run(["run", str(SCRIPT), *words], dict(os.environ), 200)
    assert code == 0, out + err
    (digest,) = [line for line in out.splitlines() if line.startswith("digest ")]
    return digest, out


@pytest.mark.slow
def test_one_digest_on_processes_that_are_killed_in_either_pass(tmp_path: Path) -> None:
    expected, _ = ended("towers", "1")
    for number in ("1", "2"):
        folder = tmp_path / f"killed-in-pass-{number}"
        folder.mkdir()
        found, out = ended(
            "processes", "2", str(tmp_path / number), str(script.STEPS), str(folder), number
        )
        assert found == expected
        assert {path.name for path in folder.iterdir()} == {"killed-0", "killed-1"}
        assert out.count("killed by signal 9") == 2


@pytest.mark.slow
def test_one_digest_on_processes_and_resumed_elsewhere_in_mid_epoch(tmp_path: Path) -> None:
    expected, _ = ended("towers", "1")
    assert ended("processes", "3")[0] == expected
    ended("processes", "2", str(tmp_path), "4")
    assert ended("processes", "3", str(tmp_path), str(script.STEPS))[0] == expected


@pytest.mark.slow
def test_verify_records_the_second_pass() -> None:
    words = ["verify", "--devices", "cpu", "--workers", "1,2", "--updates", "2"]
    words += ["--no-towers", "--no-resume", "--no-kill"]  # a run each
    code, out, err = WARM.run([*words, str(SCRIPT), "processes", "2"], dict(os.environ), 400)
    assert code == 0, out + err
    assert "same bits on 1 worker and 2 workers, after each of 2 updates" in out
    assert "one shard computed twice on cpu: same bits" in out
