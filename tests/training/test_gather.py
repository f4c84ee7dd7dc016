"""Losses over the whole batch: equal to a batch in one piece, with the same bits on any workers."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import front_door
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import LossError, NotFiniteError, SettingError

# Of an epoch's three batches the last has 10 rows; in shards of 2, 3 or 4 rows.
ROWS, BATCH, SHARDS, STEPS = 46, 18, 5, 9


class Encoder(nn.Module):
    """Maps two views to unit vectors; the temperature is learnt, and used by the loss alone."""

    def __init__(self, dropout: float = 0.2, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        self.log_temperature = nn.Parameter(torch.tensor(-0.5))


def views() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, x + 0.1 * torch.randn(ROWS, 6, generator=generator))


def unit_vectors(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    return tuple(F.normalize(model.body(view), dim=1) for view in batch)


def info_nce(model: nn.Module, views: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    one, other = views
    logits = one @ other.T / model.log_temperature.exp()
    own = torch.arange(len(one))
    return {
        "loss": (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2,
        "accuracy": (logits.argmax(1) == own).float().mean(),
    }


DATA = views()
# Dropout would differ: random numbers belong to a shard. LayerNorm normalises each row alone.
Plain = partial(Encoder, 0.0, nn.LayerNorm)
GATHER = quorate.Gather(unit_vectors, info_nce)


def trainer(model: Any = Encoder, workers: int = 1, **options: Any) -> quorate.Trainer:
    defaults: dict[str, Any] = {
        "loss": GATHER,
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "ema_decay": 0.9,
        "engine": "towers",
        "shards": SHARDS,
        "spot_check_every": 0,
    }
    sizes = {"batch_size": BATCH, "devices": "cpu", "workers": workers}
    return front_door.trainer(model, **sizes, **defaults | options)


def batches(steps: int, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    """The rows of each step, in their order."""
    starts = range(0, ROWS, BATCH)
    found = [DATA[start : start + BATCH] for start in [*starts] * steps]
    return [[view.to(dtype) for view in batch] for batch in found[:steps]]


@pytest.mark.parametrize(
    ("dtype", "shards", "bound"), [(torch.float32, 5, 1e-6), (torch.float64, 1, 1e-12)]
)
def test_value_and_gradient_are_those_of_one_whole_batch(
    dtype: torch.dtype, shards: int, bound: float
) -> None:
    """Use SGD with a rate of 1: parameters change by the gradient, the temperature too."""
    rows = TensorDataset(*(view.to(dtype) for view in DATA.tensors))
    ours = trainer(
        lambda: Plain().to(dtype), optimizer=partial(torch.optim.SGD, lr=1.0), shards=shards
    )
    before = Plain().to(dtype).state_dict()
    reports = ours.updates(rows, steps=3, shuffle=False)
    for report, batch in zip(reports, batches(3, dtype), strict=True):
        model = Plain().to(dtype)
        model.load_state_dict(before)
        returned = info_nce(model, unit_vectors(model, batch))
        returned["loss"].backward()
        assert report.metrics["loss"] == pytest.approx(returned["loss"].item(), abs=bound)
        assert report.metrics["accuracy"] == pytest.approx(returned["accuracy"].item(), abs=1e-7)
        before = {name: value.clone() for name, value in ours.model.state_dict().items()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            expected = parameter.detach() - parameter.grad
            torch.testing.assert_close(before[name], expected, rtol=0, atol=bound)


def test_an_evaluation_is_over_whole_batches() -> None:
    ours = trainer(Plain, workers=2)
    ours.fit(DATA, steps=2)
    for averaged, model in ((False, ours.model), (True, ours.averaged_model)):
        assert model is not None
        model.eval()
        of_batches = [(info_nce(model, unit_vectors(model, b)), b) for b in batches(3)]
        total = sum(returned["loss"].item() * len(b[0]) for returned, b in of_batches)
        found = ours.evaluate(DATA, averaged=averaged)
        assert found["loss"] == pytest.approx(total / ROWS, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "got", "options"),
    [
        ("update", "quorum:2", {"update": "quorum:2"}),
        ("compile", True, {"compile": True}),
        ("optimizer", "LBFGS", {"optimizer": torch.optim.LBFGS}),
        ("servers", 1, {"workers": 2, "engine": "ray", "servers": 1}),
    ],
)
def test_what_has_no_whole_batch_is_refused(
    name: str, got: object, options: dict[str, Any]
) -> None:
    with expect_error(SettingError, name=name, got=got):
        trainer(**options).fit(DATA, steps=1)


def no_rows(model: nn.Module, batch: Any) -> Any:
    return unit_vectors(model, batch)[0].mean()


def of_single_rows(model: nn.Module, batch: Any) -> Any:
    return [z[:, : len(z)] for z in unit_vectors(model, batch)]


def normalises(model: nn.Module, views: Any) -> torch.Tensor:
    return F.mse_loss(model.body[1](views[0].repeat(1, 4)), views[1].repeat(1, 4))


def is_detached(model: nn.Module, views: Any) -> torch.Tensor:
    return views[0].detach().mean() * model.log_temperature


@pytest.mark.parametrize(
    ("represent", "contrast"),
    [
        (no_rows, info_nce),
        (of_single_rows, lambda _, views: views[0].sum()),
        (unit_vectors, normalises),
        (unit_vectors, is_detached),
        (unit_vectors, lambda _, views: views[0]),
    ],
    ids=["no rows", "rows by rows", "writes a buffer", "is detached", "no scalar"],
)
def test_mistakes_are_said_in_a_line(represent: Any, contrast: Any) -> None:
    with expect_error(LossError):
        trainer(loss=quorate.Gather(represent, contrast)).fit(DATA, steps=1)


def test_what_contrast_raises_is_raised_with_its_step() -> None:
    def contrast(model: nn.Module, views: Any) -> Any:
        if len(views[0]) == BATCH:
            raise ValueError("as a whole")
        return info_nce(model, views)

    with pytest.raises(ValueError, match="as a whole") as raised:
        trainer(loss=quorate.Gather(unit_vectors, contrast)).fit(DATA, steps=1)
    assert raised.value.__notes__[0] == "quorate: in contrast, of the whole batch of step 0"


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_finite_makes_no_update(nonfinite: str) -> None:
    def contrast(model: nn.Module, views: Any) -> Any:
        returned = info_nce(model, views)
        if len(views[0]) == BATCH:
            returned["loss"] = returned["loss"] / 0.0
        return returned

    ours = trainer(
        loss=quorate.Gather(unit_vectors, contrast), optimizer=torch.optim.Adam, nonfinite=nonfinite
    )
    if nonfinite == "stop":
        with expect_error(NotFiniteError):
            ours.fit(DATA, steps=1)
    else:
        reports = list(ours.updates(DATA, steps=3))
        assert [report.not_finite for report in reports] == [1, 2, 2]  # the last has fewer rows


def test_in_16_bits_the_loss_is_computed_in_32() -> None:
    seen = set()

    def contrast(model: nn.Module, views: Any) -> Any:
        seen.add(views[0].dtype)
        return info_nce(model, views)

    loss = quorate.Gather(unit_vectors, contrast)
    narrow, wide = (
        [report.metrics["loss"] for report in made.updates(DATA, steps=3)]
        for made in (trainer(workers=2, precision="bf16", loss=loss), trainer())
    )
    assert narrow == pytest.approx(wide, abs=0.05)
    assert seen == {torch.float32}
