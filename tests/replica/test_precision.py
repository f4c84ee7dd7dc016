"""Precision: masters in float32, the dtypes of replicas, and a single digest within each."""

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest_of
from support.fits import fit
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import NotFiniteError
from quorate.machine.devices import Group
from quorate.replica.computing import Computing
from quorate.replica.flat import Flat
from quorate.replica.notes import Notes
from quorate.replica.precision import float32_backends, float32_products, parse, remarks
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.replica.turns import Turns
from quorate.training.state import State

CPU = Group([torch.device("cpu")])
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Mixed(nn.Module):
    """Layers of each kind: lowered, kept for the statistics, kept for the dtype, frozen."""

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
ONES = TensorDataset(torch.ones(12, 1))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def state_of(model: nn.Module) -> State:
    optimize = quorate.Optimize(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    return State(model, CPU[0], shared=False, optimize={None: optimize}, loss=cross_entropy)


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
    """Keep updates too small for bfloat16."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return (model.weight * batch[0].mean()).sum()

    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    slowly = functools.partial(torch.optim.SGD, lr=2.0**-12)
    fit(model, loss, ONES, steps=7, optimizer=slowly, workers=2, precision="bf16")
    assert model.weight.item() == 1 - 7 * 2.0**-12
    assert torch.tensor(1 - 2.0**-12).bfloat16().item() == 1  # bfloat16 would have stood still


def mlp() -> nn.Module:
    torch.manual_seed(5)
    layers = (nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    return nn.Sequential(*layers)


def trained_mlp(
    workers: int, precision: str, loss: Any = cross_entropy, **options: Any
) -> quorate.Trainer:
    options |= {"workers": workers, "engine": "towers", "precision": precision, "epochs": 6}
    return fit(mlp(), loss, TensorDataset(IMAGES, LABELS), optimizer=torch.optim.Adam, **options)


def test_float16_gives_one_digest_also_where_gradients_overflow() -> None:
    def steep(model: nn.Module, batch: Any) -> torch.Tensor:
        # Gradients of rows with label 0 overflow at the first scale.
        images, labels = batch
        weight = torch.where(labels == 0, 3e4, 1.0)
        return (F.cross_entropy(model(images), labels, reduction="none") * weight).mean()

    for loss in (cross_entropy, steep):
        assert len({digest_of(trained_mlp(n, "fp16", loss=loss)) for n in (1, 3)}) == 1


@pytest.mark.parametrize(
    ("factor", "scales"),
    [
        (1e3, 3),  # 8192 and 512 are too large for 1000 * scale < 65504
        (2.0**-26, 1),  # too small for float16, and not lost
        (math.inf, 1),  # the loss is not finite: no scale can help
    ],
)
def test_a_gradient_that_overflows_is_computed_again_with_a_smaller_scale(
    factor: float, scales: int
) -> None:
    """Use the loss factor * x @ w: its gradient is factor * x, whatever the scale."""
    seen: list[torch.Tensor] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        product = model(batch[0])
        product.register_hook(seen.append)
        return product.float().mean() * factor

    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    found, gradient = gradient_of(replica_of(state_of(model), loss, "fp16"), torch.ones(4, 1))
    assert found.means()["loss"] == factor
    value = gradient.views["weight"].item()  # weight * gradient
    assert value == 4 * factor if math.isfinite(factor) else not math.isfinite(value)
    assert len(seen) == scales


def test_a_gradient_that_no_scale_makes_finite_is_an_error() -> None:
    def root(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() * 0).abs().sqrt().mean()  # 0, with the derivative inf * 0

    with expect_error(NotFiniteError):
        fit(nn.Linear(1, 1), root, ONES, steps=1, precision="fp16")


def test_training_and_evaluation_leave_the_users_model_in_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trained_mlp(1, "bf16", ema_decay=0.9, run_dir=tmp_path)
    assert "sync, bf16" in capsys.readouterr().out
    data = TensorDataset(IMAGES, LABELS)
    plain, averaged = (trainer.evaluate(data, averaged=which)["loss"] for which in (False, True))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.averaged_model is not None
    for found, model in ((plain, trainer.model), (averaged, trainer.averaged_model)):
        model.eval()
        with torch.no_grad():
            assert found == pytest.approx(cross_entropy(model, [IMAGES, LABELS]).item(), rel=0.02)
    assert plain != averaged


def test_tensor_float_is_off_unless_asked_for() -> None:
    seen, expected = [], {"fp32": "ieee", "tf32": "tf32", "bf16": "ieee"}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(tuple(backend.fp32_precision for backend in float32_backends()[:3]))
        return cross_entropy(model, batch)

    options = {"optimizer": torch.optim.Adam, "batch_size": 6, "workers": 1, "devices": "cpu"}
    trainers = {name: quorate.Trainer(mlp(), loss, precision=name, **options) for name in expected}
    loops = {n: t.updates(TensorDataset(IMAGES, LABELS), steps=3) for n, t in trainers.items()}
    for precision in [*expected] * 3:  # the loops take turns
        seen.clear()
        next(loops[precision])
        assert {*seen} == {(expected[precision],) * 3}, precision
    with float32_products(parse("fp32")) as said:
        assert said == []  # no GPU is concerned
    assert "no effect on cpu" in remarks(parse("tf32"), CPU)[0]
    assert "slow" in remarks(parse("fp16"), CPU)[0]
    assert remarks(parse("tf32"), [torch.device("cuda", 0)]) == []
