"""Models for stages, each hard to cut for a different reason: the calls, and the cuts.

``BATCH`` says what a row has; a case's ``call`` picks the arguments of its model.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.trainings.models import Experts
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset

ROWS = 20


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of all inputs of models: floats, sequences, images, tokens, questions."""

    def __init__(self, rows: int = ROWS) -> None:
        of = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, 30, (rows, 12), generator=of)
        tokens[:, 9:] *= torch.rand(rows, 1, generator=of) < 0.5  # 0 fills up short ones
        self.values = {
            "x": torch.randn(rows, 6, generator=of),
            "sequence": torch.randn(rows, 5, 8, generator=of),
            "image": torch.randn(rows, 1, 8, 8, generator=of),
            "tokens": tokens,
            "answer": torch.randint(1, 30, (rows, 4), generator=of),
        }

    def __len__(self) -> int:
        return len(self.values["x"])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: value[row] for name, value in self.values.items()}


class Case(NamedTuple):
    """A model, the places of cuts, and the call with a batch of ``Rows``."""

    model: Callable[[], nn.Module]
    split: list[str]
    call: Callable[[Any, Any], Any] = lambda model, batch: model(batch["x"])


def layer(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3))


class Uses(nn.Module):
    """A parameter, a module and values used in several stages, several times in each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.again = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.again(self.a(x)) * self.scale + x.sin() * self.scale
        y = self.b(first) * self.scale + first * self.scale.exp() + self.again(first)
        y = y * first.tanh() + self.again(y)
        z = self.c(y + first) * self.scale + y * first + self.again(y) * self.a.weight.sum()
        return z * self.scale + first.square() + y


class Tied(nn.Module):
    """Has a weight at both ends, and a frozen weight between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.words = nn.Linear(6, 30, bias=False)
        self.words.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        between = self.frozen(self.middle(self.embedding(tokens))).relu_()
        words: torch.Tensor = self.words(between + self.embedding(tokens.flip(1)))
        return words


def of_earlier_stages(model: Tied, batch: Any) -> Any:
    """Use parameters of the first stage in the loss, too, and draw around the model."""
    tokens = torch.where(torch.rand(batch["tokens"].shape) < 0.1, 1, batch["tokens"])
    output = model(tokens) * (1 + torch.rand(()))
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return output, model.embedding(batch["tokens"]).sin(), 1e-3 * penalty


class Point(NamedTuple):
    x: torch.Tensor
    extra: torch.Tensor | None


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        y = self.layer(batch["x"])
        return {"pair": (y, None), "rows": len(y), "point": Point(y * 2, None)}


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, given: dict[str, Any], point: Point, none: None) -> Any:
        assert none is None
        assert point.extra is None
        return [self.layer(given["pair"][0]) / given["rows"], {"point": point}]


class Nests(nn.Module):
    """Modules with dicts, tuples, None and numbers as arguments and results; so do parts."""

    def __init__(self) -> None:
        super().__init__()
        self.gives, self.takes, self.last = Gives(), Takes(), nn.Linear(6, 6)

    def forward(
        self, batch: dict[str, Any], *more: Any, mask: Any = None, warmth: float = 1.0
    ) -> dict[str, Any]:
        given = self.gives(batch)
        pair, number = given["pair"], given["rows"]
        point = Point(pair[0] + more[0][0] * warmth, None)
        out, named = self.takes(given, point, pair[1])
        assert mask is None
        out = out - pair[0].mean().item()
        return {"out": (self.last(out), None), "rows": number, "point": named["point"], **batch}


def nested(model: nn.Module, batch: Any) -> Any:
    warmth = 1 + float(batch["answer"].sum())
    return model({"x": batch["x"], "names": ["a", 1], "none": None}, [batch["x"]], warmth=warmth)


class Sized(nn.Module):
    """Shapes, factories, branches on the number of dimensions, loops, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("offset", torch.ones(4))
        self.plain = torch.arange(4.0)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, *rest = x.shape
        if x.ndim == 3 and len(rest) == 2:
            x = x.mean(1)
        y = self.a(x).view(n, 2, -1).transpose(1, 2).reshape(len(x), 8)
        y = y + torch.arange(n, device=x.device)[:, None] + torch.zeros(n, 8, dtype=y.dtype)
        y = y + torch.randn(1, 8) + torch.rand(len(x), 8) + torch.rand_like(y)
        z = self.b(F.dropout(y, 0.4, self.training))
        for part in z.chunk(2, dim=1):
            z = torch.cat([part, z], dim=1)
        z = z[:, :4] * self.offset + self.plain
        z[:, 0] += 1
        z += torch.full((n, 4), 0.5) * (z > 0).to(z.dtype)
        return z / math.sqrt(z.shape[-1])


class WritesInPlace(nn.Module):
    """Writes in place, after the cut, to values that skip the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norms[0](self.convolutions[0](x)))
        y = self.norms[1](self.convolutions[1](y))
        y += x
        rectified: torch.Tensor = self.relu(y)
        return rectified


def resnet() -> nn.Module:
    first = nn.Conv2d(1, 4, 3, padding=1), WritesInPlace(), WritesInPlace()
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2), nn.Dropout(0.2, inplace=True)
    return nn.Sequential(*first, *ends).to(memory_format=torch.channels_last)


class Tripled(torch.autograd.Function):
    """Has a backward pass unlike the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class Told(nn.Module):
    """A forward pass with a single action between two layers."""

    def __init__(self, does: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.does, self.calls = nn.Linear(6, 6), nn.Linear(6, 6), does, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = self.b(self.does(self, self.a(x)))
        return last


class Checkpointed(nn.Module):
    """Has a part that is computed again in the backward pass, with the same dropout."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.a, self.c, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant
        self.b = layer()
        self.b[1] = nn.LayerNorm(6)  # BatchNorm would see the rows twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if self.training or not self.reentrant:  # torch warns without gradients
            x = torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=self.reentrant)
        last: torch.Tensor = self.c(x)
        return last


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_full_backward_hook(lambda module, grads, _: (grads[0],))
    return model


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.Linear(8, 2),
    )


class Frozen(nn.Module):
    """Has a first stage without any gradient, with a layer that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        self.backbone = nn.Sequential(*layers).requires_grad_(False)
        self.adapter, self.head = nn.Linear(144, 8), nn.Linear(8, 2)
        self.train()

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.backbone[1].eval()
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = self.backbone(images)
        logits: torch.Tensor = self.head(self.adapter(seen).relu())
        return logits


class WritesEarlier(nn.Module):
    """A value of the first part is written while the second one's is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.a(x).sin()
        y = self.b(x)
        early.mul_(2)
        last: torch.Tensor = self.c(y) + early
        return last


def chain() -> nn.Module:
    return nn.Sequential(*(layer() for _ in range(3)), nn.Linear(6, 2))


CASES = {
    "chain": Case(chain, ["1", "2.3", "3"]),
    "used again": Case(Uses, ["b", "c"]),
    "tied": Case(Tied, ["middle.1", "words"], of_earlier_stages),
    "nested": Case(Nests, ["takes", "last"], nested),
    "sized": Case(Sized, ["b"], lambda model, b: model(b["sequence"])),
    "resnet": Case(resnet, ["2.norms.1"], lambda model, b: model(b["image"])),
    "own backward": Case(lambda: Told(lambda _, x: Tripled.apply(x).tanh()), ["b"]),
    "checkpointed": Case(lambda: Checkpointed(reentrant=False), ["c"]),
    "reentrant": Case(lambda: Checkpointed(reentrant=True), ["c"]),
    "hooks": Case(hooked, ["1", "2"]),
    "parametrized": Case(parametrized, ["1", "2"]),
    "frozen": Case(Frozen, ["adapter"], lambda model, b: model(b["image"])),
    "experts": Case(
        lambda: nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(3, 2)),
        ["2"],
        lambda model, b: model(b["sequence"][:, 0]),
    ),
    "writes earlier": Case(WritesEarlier, ["b"]),
}
