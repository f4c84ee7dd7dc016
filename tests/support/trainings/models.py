"""Models of the configurations: name -> model, kind of inputs, loss.

The models cover dropout, BatchNorm, buffers, tied and frozen weights, sparse gradients, phases, and
a loss over all rows of a batch.
"""

from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import quorate

WORDS, CLASSES = 24, 3

Batch = list[torch.Tensor]  # inputs, classes, and the weights of rows where the data has them


def classify(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the mean cross entropy over rows, or over their weights where the batch has them."""
    logits = model(batch[0])
    own = batch[1].device.index  # "cuda" without a number means this device, in any thread
    assert own is None or torch.accelerator.current_device_index() == own
    right = (logits.argmax(1) == batch[1]).float()
    if len(batch) == 2:
        return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": right.mean()}
    weights = batch[2]
    losses = F.cross_entropy(logits, batch[1], reduction="none")
    total = weights.sum()
    return {
        "loss": (losses * weights).sum() / total,
        "accuracy": (right * weights).sum() / total,
        "weight": total,
    }


def in_terms(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return a term over some rows, few or none of a shard, and a term over all rows."""
    logits, labels, some = model(batch[0]), batch[1], batch[0][:, 0] > 1.0
    right = (logits.argmax(1) == labels)[some].float()
    sure = F.cross_entropy(logits[some], labels[some])  # NaN without a row
    return {
        "loss": {"sure": {"loss": sure, "weight": some.sum()}, "size": logits.square().mean()},
        "accuracy": {"loss": right.mean(), "weight": some.sum()},
    }


def stack(**layers: nn.Module) -> nn.Sequential:
    """Return layers in sequence, by their names."""
    return nn.Sequential(OrderedDict(layers))


def linear() -> nn.Module:
    return stack(first=nn.Linear(8, 6), last=nn.Linear(6, CLASSES))


def mlp() -> nn.Module:
    return stack(
        first=nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.LayerNorm(24), nn.Dropout(0.2)),
        second=nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.3)),
        last=nn.Linear(24, CLASSES),
    )


def convolution() -> nn.Module:
    return stack(
        first=nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        second=nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU()),
        flat=nn.Sequential(nn.MaxPool2d(2), nn.Flatten()),
        last=nn.Linear(8 * 9, CLASSES),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.last = nn.Linear(16, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embedding(tokens)
        for layer in self.layers:
            states = layer(states)
        return self.last(states.mean(1))


class Sparse(nn.Module):
    """Two tables with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=0, sparse=True)
        self.bag = nn.EmbeddingBag(WORDS, 8, mode="sum", sparse=True)
        self.last = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, CLASSES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(tokens).mean(1) + self.bag(tokens))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(12, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(self.embedding(tokens))[0][:, -1])


class Tied(nn.Module):
    """The embedding and the last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))
        self.words = nn.Linear(8, WORDS, bias=False)
        self.words.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(self.middle(self.embedding(tokens)).mean(1))


class Frozen(nn.Module):
    """A frozen part with BatchNorm, an unused layer, and trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12)).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.ELU(), nn.Dropout(0.1))
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.frozen(x)))


class Buffers(nn.Module):
    """``forward`` writes a running mean and a count; a third buffer is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((12,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
                self.seen.add_(1)
        return self.last(torch.tanh(hidden - self.mean) * self.scale)


class Experts(nn.Module):
    """Routes each row to one of four experts, some without rows; the use of experts is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        self.register_buffer("usage", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("table", torch.rand(5, dtype=torch.float64) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        route = x[:, 0].round().long().clamp(0, 3)
        if self.training:
            self.usage += torch.bincount(route, minlength=4)
        places = [(route == number).nonzero()[:, 0] for number in range(4)]
        parts = [
            torch.zeros_like(x).index_add(0, rows, expert(x[rows]))
            for rows, expert in zip(places, self.experts, strict=True)
            if len(rows)
        ]
        return self.last(self.norm(sum(parts) + x))


def write_and_classify(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the same as ``classify`` of twice the inputs, and leave another batch behind."""
    x = batch.pop(0)
    x.mul_(2)
    return classify(model, [x, *batch])


@dataclass
class Output(OrderedDict[str, torch.Tensor]):
    """A copy of ``transformers.utils.ModelOutput``: a dataclass, and a mapping without None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


class Pretrained(Transformer):
    """A model in the style of Hugging Face: takes names, returns loss and logits at once."""

    def forward(
        self, input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> Output:
        logits = super().forward(input_ids)
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


def whole_output(model: nn.Module, batch: Batch) -> Output:
    """Return the whole output of the model."""
    return model(**dict(zip(("input_ids", "labels"), batch, strict=False)))


def generator(noise: int, hidden: int, width: int) -> nn.Module:
    first, norm = nn.Linear(noise, hidden), nn.BatchNorm1d(hidden)
    return stack(first=first, norm=norm, relu=nn.ReLU(), last=nn.Linear(hidden, width))


def critic(width: int, hidden: int, dropout: float) -> nn.Module:
    first, last = nn.Linear(width, hidden), nn.Linear(hidden, 1)
    return stack(first=first, relu=nn.LeakyReLU(0.2), dropout=nn.Dropout(dropout), last=last)


def critic_loss(model: nn.ModuleDict, batch: Batch) -> dict[str, Any]:
    """Return the critic's loss on rows of the batch and on as many generated rows."""
    real = model["d"](batch[0])
    fake = model["d"](model["g"](torch.randn(len(batch[0]), 4, device=batch[0].device)).detach())
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    return {"loss": loss, "right": (real > 0).float().mean()}


def generator_loss(model: nn.ModuleDict, batch: Batch) -> torch.Tensor:
    """Return the loss of generated rows."""
    noise = torch.randn(len(batch[0]), 4, device=batch[0].device)
    return F.softplus(-model["d"](model["g"](noise))).mean()


class Encoder(nn.Module):
    """Maps a row and a distorted copy to unit vectors, with a trained temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 4)
        )
        self.log_temperature = nn.Parameter(torch.tensor(-0.5))


def represent(model: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return unit vectors of the rows and of their distorted copies."""
    views = batch[0], batch[0] + 0.1 * torch.randn_like(batch[0])
    return tuple(F.normalize(model.body(view), dim=1) for view in views)


def contrast(model: Any, views: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Return InfoNCE over all rows of a batch."""
    logits = views[0] @ views[1].T / model.log_temperature.exp()
    own = torch.arange(len(logits), device=logits.device)
    return {
        "loss": F.cross_entropy(logits, own),
        "accuracy": (logits.argmax(1) == own).float().mean(),
    }


class Model(NamedTuple):
    """A row of the table."""

    make: Any  # as for ``Trainer``
    inputs: str  # a name in ``datasets.INPUTS``
    loss: Any = classify  # as for ``Trainer``
    phases: tuple[str, ...] = ()  # each has a separate optimizer


MODELS: dict[str, Model] = {
    "linear": Model(linear, "vectors"),
    "mlp": Model(mlp, "vectors"),
    "convolution": Model(convolution, "images"),
    "transformer": Model(Transformer, "tokens"),
    "sparse": Model(Sparse, "tokens"),
    "lstm": Model(Lstm, "tokens"),
    "tied": Model(Tied, "tokens"),
    "frozen": Model(Frozen, "vectors"),
    "buffers": Model(Buffers, "vectors"),
    "pretrained": Model(Pretrained, "tokens", whole_output),
    "experts": Model(Experts, "vectors", write_and_classify),
    "phases": Model(
        {"g": partial(generator, 4, 12, 8), "d": partial(critic, 8, 12, 0.2)},
        "vectors",
        [("d", critic_loss), ("d", critic_loss), ("g", generator_loss)],
        phases=("g", "d"),
    ),
    "contrastive": Model(Encoder, "vectors", quorate.Gather(represent, contrast)),
    "terms": Model(mlp, "vectors", in_terms),
}
DRAWN = tuple(MODELS)[:-1]  # for random configurations: losses of former versions had no terms
