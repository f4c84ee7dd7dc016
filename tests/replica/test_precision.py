"""Precision: masters in float32, what replicas compute with, and one digest within each."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import front_door
from support.digests import digest_of
from support.everything import EVERYTHING, SCRIPT, digest_on_one_tower, trained
from support.messages import expect_error
from support.references import References
from support.runs import command, inspected, run
from support.warm import WARM
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import NotFiniteError
from quorate.machine.devices import Group
from quorate.replica.computing import Computing
from quorate.replica.digest import digest
from quorate.replica.flat import Flat
from quorate.replica.notes import Notes
from quorate.replica.precision import (
    FIRST_SCALE,
    LEAST_SCALE,
    SCALE_STEP,
    float32_products,
    parse,
    remarks,
)
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.replica.turns import Turns
from quorate.training.state import State

CPU = Group([torch.device("cpu")])
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Mixed(nn.Module):
    """A layer of each kind: lowered, kept for its statistics, kept for its dtype, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.layer_norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 3)
        self.exact = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.convolution(images)))
        x = x.mean((2, 3)) * self.scale
        x = self.linear(self.layer_norm(x.repeat(1, 4)))
        return self.frozen(x) * self.exact.float()


IMAGES = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % 3


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def state_of(model: nn.Module) -> State:
    optimize = quorate.Optimize(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    return State(model, CPU[0], shared=False, optimize=optimize)


def replica_of(state: State, loss: Any, precision: str) -> Replica:
    return Replica(
        state.model, state.parameters, CPU, loss=loss, turns=Turns(),
        computing=Computing(parse(precision)), notes=Notes(),
    )  # fmt: skip


def gradient_of(replica: Replica, *batch: torch.Tensor) -> tuple[ShardSum, Flat]:
    with Stream() as stream:
        found = replica.gradient(list(batch), len(batch[0]), stream, seed=1)
    assert found.gradient is not None
    return found, found.gradient


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_lowered(precision: str) -> None:
    model = Mixed()
    replica = replica_of(state_of(model), cross_entropy, precision)
    lowered = {n for n, p in replica.model.named_parameters() if p.dtype == NARROW[precision]}
    assert lowered == {
        "convolution.weight", "convolution.bias", "scale", "linear.weight", "linear.bias"
    }  # fmt: skip
    assert replica.model.exact.dtype == torch.float64
    assert {p.dtype for n, p in model.named_parameters() if n != "exact"} == {torch.float32}
    assert {b.dtype for b in replica.model.buffers()} == {torch.float32, torch.int64}


def test_a_gradient_is_that_of_autocast_over_rounded_weights() -> None:
    torch.manual_seed(0)
    model = Mixed()
    by_hand = copy.deepcopy(model)
    for module in (by_hand.convolution, by_hand.linear):
        module.to(torch.bfloat16)
    by_hand.scale.data = by_hand.scale.data.bfloat16()
    found, gradient = gradient_of(
        replica_of(state_of(model), cross_entropy, "bf16"), IMAGES, LABELS
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(by_hand, [IMAGES, LABELS])
    loss.backward()
    assert loss.dtype == torch.float32
    assert found.means()["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in by_hand.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            mine = gradient.views[name]
            assert mine.dtype == model.get_parameter(name).dtype  # as the masters
            assert torch.equal(mine, 12 * parameter.grad.to(mine.dtype)), name
    assert found.buffers is not None
    assert found.buffers.dtype == torch.float64


def test_updates_are_those_of_float32_masters() -> None:
    """An update that bfloat16 could not hold is not lost."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return (model.weight * batch[0].mean()).sum()

    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    trainer = quorate.Trainer(
        model, loss, optimizer=lambda params: torch.optim.SGD(params, lr=2.0**-12), batch_size=4,
        shards=2, devices="cpu", workers=quorate.Workers(2, engine="towers"), precision="bf16",
    )  # fmt: skip
    for _ in trainer.updates(TensorDataset(torch.ones(4, 1)), steps=7):
        pass
    assert trainer.model.weight.item() == 1 - 7 * 2.0**-12
    assert torch.tensor(1 - 2.0**-12).bfloat16().item() == 1  # it would have stood still


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_one_digest_on_any_number_of_towers(precision: str, references: References) -> None:
    expected = digest_on_one_tower(references, 4, precision=precision)
    assert expected != digest_on_one_tower(references, 4) or precision == "tf32"
    for workers in (2, 3):
        assert digest_of(trained(workers, 4, precision=precision)) == expected, workers


@pytest.mark.slow
def test_one_digest_on_worker_processes(tmp_path: Path, references: References) -> None:
    words, bf16 = ("hundred.py", "10", "adam"), ("--precision", "bf16")
    expected = references.on_a_tower(*words, options=bf16)
    three = ("--workers", "3", "--engine", "processes", "--run-dir", str(tmp_path))
    ended = run(command(*words, options=(*three, *bf16)))
    assert ended.code == 0, ended.said
    assert inspected(tmp_path)["digest"] == expected.facts["digest"]


def test_one_digest_after_a_resume_on_other_devices(tmp_path: Path) -> None:
    def trained_to(steps: int, workers: int, run_dir: Path) -> str:
        torch.manual_seed(3)
        trainer = quorate.Trainer(
            EVERYTHING.Everything(), EVERYTHING.loss, optimizer=torch.optim.Adam, batch_size=24,
            shards=4, devices="cpu",
            workers=quorate.Workers(workers, engine="towers"), precision="bf16",
            run_dir=run_dir,
        )  # fmt: skip
        trainer.fit(EVERYTHING.Sentences(110), steps=steps)
        return digest(trainer.model.state_dict().items())

    trained_to(4, 3, tmp_path / "parts")
    assert trained_to(9, 2, tmp_path / "parts") == trained_to(9, 1, tmp_path / "whole")


def mlp() -> nn.Module:
    torch.manual_seed(5)
    layers = (nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    return nn.Sequential(*layers)


def trained_mlp(workers: int, precision: str, **options: Any) -> quorate.Trainer:
    trainer = front_door.trainer(
        mlp(), options.pop("loss", cross_entropy), optimizer=torch.optim.Adam, batch_size=12,
        shards=4, devices="cpu",
        workers=quorate.Workers(workers, engine="towers"), precision=precision, **options,
    )  # fmt: skip
    for _ in trainer.updates(TensorDataset(IMAGES, LABELS), epochs=6):
        pass
    return trainer


def test_float16_gives_one_digest_also_where_gradients_overflow() -> None:
    def steep(model: nn.Module, batch: Any) -> torch.Tensor:
        # Rows with label 0 have gradients that overflow at the first scale.
        images, labels = batch
        weight = torch.where(labels == 0, 3e4, 1.0)
        return (F.cross_entropy(model(images), labels, reduction="none") * weight).mean()

    for loss in (cross_entropy, steep):
        digests = {
            digest(trained_mlp(workers, "fp16", loss=loss).model.state_dict().items())
            for workers in (1, 2, 3)
        }
        assert len(digests) == 1


def weights_times(factor: float) -> Any:
    scales: list[float] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        product = model(batch[0])
        product.register_hook(lambda gradient: scales.append(gradient.abs().max().item()))
        return product.float().mean() * factor

    return loss, scales


def test_a_gradient_that_overflows_is_computed_again_with_a_smaller_scale() -> None:
    """The loss is factor * x @ w, its gradient factor * x, whatever the scale."""
    model = nn.Linear(1, 1, bias=False)
    loss, scales = weights_times(1e3)
    found, gradient = gradient_of(replica_of(state_of(model), loss, "fp16"), torch.ones(4, 1))
    assert gradient.views["weight"].item() == 4 * 1e3  # weight * gradient
    assert found.means()["loss"] == pytest.approx(1e3 * model.weight.item(), rel=1e-3)
    assert len(scales) == 3  # 8192 and 512 are too large for 1000 * scale < 65504


def test_a_gradient_below_what_float16_holds_is_not_lost() -> None:
    model = nn.Linear(1, 1, bias=False)
    loss, scales = weights_times(2.0**-26)
    _, gradient = gradient_of(replica_of(state_of(model), loss, "fp16"), torch.ones(4, 1))
    assert gradient.views["weight"].item() == 4 * 2.0**-26
    assert torch.tensor(2.0**-26).half().item() == 0
    assert len(scales) == 1


def test_what_is_not_finite_stays_so() -> None:
    model = nn.Linear(1, 1, bias=False)
    loss, scales = weights_times(math.inf)
    _, gradient = gradient_of(replica_of(state_of(model), loss, "fp16"), torch.ones(4, 1))
    assert not math.isfinite(gradient.views["weight"].item())
    assert len(scales) == 1  # the loss is not finite: no scale can help

    def root(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() * 0).abs().sqrt().mean()  # 0, its derivative inf * 0

    with expect_error(NotFiniteError):
        trained_root(root)


def trained_root(loss: Any) -> None:
    trainer = quorate.Trainer(
        nn.Linear(1, 1), loss, optimizer=torch.optim.SGD, batch_size=4, shards=1, devices="cpu",
        workers=1, precision="fp16",
    )  # fmt: skip
    for _ in trainer.updates(TensorDataset(torch.ones(4, 1)), steps=1):
        pass


def test_the_scales_end() -> None:
    steps = math.log(FIRST_SCALE / LEAST_SCALE, SCALE_STEP)
    assert steps == int(steps)
    assert all(math.frexp(scale)[0] == 0.5 for scale in (FIRST_SCALE, LEAST_SCALE, SCALE_STEP))


def test_training_and_evaluation_leave_the_users_model_in_float32(tmp_path: Path) -> None:
    trainer = trained_mlp(1, "bf16", ema_decay=0.9, run_dir=tmp_path)
    data = TensorDataset(IMAGES, LABELS)
    plain, averaged = (trainer.evaluate(data, averaged=which)["loss"] for which in (False, True))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.averaged_model is not None
    for found, model in ((plain, trainer.model), (averaged, trainer.averaged_model)):
        model.eval()
        with torch.no_grad():
            assert found == pytest.approx(cross_entropy(model, [IMAGES, LABELS]).item(), rel=0.02)
    assert plain != averaged


def test_several_workers_on_snapshots_learn() -> None:
    before = cross_entropy(mlp().eval(), [IMAGES, LABELS]).item()
    trainer = trained_mlp(3, "bf16", update="async")
    assert trainer.evaluate(TensorDataset(IMAGES, LABELS))["loss"] < before


def test_tensor_float_is_off_unless_asked_for() -> None:
    cudnn: Any = torch.backends.cudnn
    seen = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        backends = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
        seen.append([backend.fp32_precision for backend in backends])
        return cross_entropy(model, batch)

    before = (torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision)
    assert before[1] == "tf32"  # torch's default: not what somebody expects of fp32
    for precision, expected in (("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")):
        seen.clear()
        trained_mlp(2, precision, loss=loss)
        assert seen
        assert all(flags == [expected] * 3 for flags in seen), precision
        assert (torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision) == before
    with float32_products(parse("fp32")) as said:
        assert said == []  # there is no GPU that it would concern


def test_what_is_said_of_devices() -> None:
    cuda = torch.device("cuda", 0)
    assert remarks(parse("fp32"), [CPU[0], cuda]) == []
    assert "no effect on cpu" in remarks(parse("tf32"), [CPU[0], cuda])[0]
    assert remarks(parse("tf32"), [cuda]) == []
    assert remarks(parse("bf16"), [cuda]) == []
    assert "slow" in remarks(parse("fp16"), CPU)[0]


def test_another_precision_at_a_resume_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, precision in ((1, "fp32"), (2, "bf16")):
        trainer = quorate.Trainer(
            mlp(), cross_entropy, optimizer=torch.optim.SGD, batch_size=12, shards=2,
            devices="cpu", workers=1, run_dir=tmp_path, precision=precision,
        )  # fmt: skip
        trainer.fit(TensorDataset(IMAGES, LABELS), steps=steps)
    said = capsys.readouterr().out
    assert "same bits: no, because precision was fp32 and is bf16 since step 1" in said
    assert "sync, bf16" in said


def test_a_wrong_precision_is_one_line(tmp_path: Path) -> None:
    words = ["run", "--precision", "fp8", "--run-dir", str(tmp_path), str(SCRIPT)]
    code, _, errors = WARM.run(words, os.environ, 60)
    assert code == 2
    expected = "one of fp32, tf32, bf32, bf16, fp16; choose one of them"
    assert errors.splitlines() == [f"quorate: precision: got 'fp8', expected {expected}"]
