"""train() and eval() as in a plain loop: a model's own, and parts that the script put aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.front_door import trainer
from torch import nn
from torch.utils.data import TensorDataset

from quorate.replica.model import unchanged

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


class KeepsNorms(Net):
    """As detectors do: their backbone's statistics stay, and its first layer is frozen."""

    def train(self, mode: bool = True) -> KeepsNorms:
        super().train(mode)
        self.backbone[1].eval()
        self.backbone[0].requires_grad_(False)
        return self


class Samples(Net):
    """Dropout stays on, in an evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> Samples:
        super().train(mode)
        self.head[2].train()
        self.calls.append(mode)
        return self


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def run(model: nn.Module, workers: int = 1) -> Any:
    made = trainer(
        model,
        loss,
        optimizer=torch.optim.SGD,
        batch_size=12,
        shards=2,
        devices="cpu",
        workers=workers,
        engine="towers",
    )
    made.fit(DATA, epochs=2)
    return made


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("loaded", ["train", "eval"])
def test_a_train_of_the_models_own_is_called(loaded: str, workers: int) -> None:
    model = KeepsNorms()
    before = model.backbone[0].weight.clone()
    nn.Module.train(model, loaded == "train")
    made = run(model, workers).model
    assert made.backbone[1].num_batches_tracked == 0
    assert torch.equal(made.backbone[1].running_mean, torch.zeros(3))
    assert torch.equal(made.backbone[0].weight, before)
    assert made.head[1].num_batches_tracked == 4


def test_parts_that_the_script_put_in_evaluation_mode_stay_so() -> None:
    model = Net()
    model.backbone.eval()
    made = run(model)
    assert made.model.backbone[1].num_batches_tracked == 0
    assert made.model.head[1].num_batches_tracked == 4
    assert made.evaluate(DATA) == made.evaluate(DATA)


def test_an_evaluation_is_what_eval_makes_of_the_model() -> None:
    made = run(Samples())
    sampled = made.evaluate(DATA)["loss"]
    made.model.head[2].p = 0.0
    assert made.evaluate(DATA)["loss"] != sampled
    dry = run(Net())
    value = dry.evaluate(DATA)["loss"]
    dry.model.head[2].p = 0.0
    assert dry.evaluate(DATA)["loss"] == value


def test_a_model_that_was_tried_has_its_own_buffers_again() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.ones(3))
            return self.net(x - self.mean)

    model = Replaces()
    own = model.mean
    with unchanged(model):
        model(X)
        assert model.mean is not own
    assert model.mean is own
    assert torch.equal(own, torch.zeros(3))
    assert [*dict(model.named_buffers())] == ["mean"]


def test_a_buffer_that_was_given_another_size_where_it_lies_has_its_own_again() -> None:
    class Observes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("least", torch.zeros(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.least.resize_(3).copy_(x.detach().amin(0))
            return super().forward(x)

    model = Observes()
    with unchanged(model):
        model(X)
        assert model.least.shape == (3,)
    assert model.least.shape == (0,)
