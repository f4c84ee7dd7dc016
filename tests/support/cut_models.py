"""Models that are hard to cut into stages, each for a reason of its own."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3))


class Uses(nn.Module):
    """A parameter, a module and values used in several stages, several times in each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(rows(6))
        self.again = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.again(self.a(x)) * self.scale + x.sin() * self.scale
        y = self.b(first) * self.scale + first * self.scale.exp() + self.again(first)
        y = y * first.tanh() + self.again(y)
        z = self.c(y + first) * self.scale + y * first + self.again(y) * self.a.weight.sum()
        return z * self.scale + first.square() + y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.words = nn.Linear(6, 12, bias=False)
        self.words.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(self.middle(self.embedding(tokens)) + self.embedding(tokens.flip(1)))


class Point(NamedTuple):
    x: torch.Tensor
    extra: torch.Tensor | None


class Nests(nn.Module):
    """Modules that give and take dicts, tuples, None and numbers; parts of the same kinds."""

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

    def __init__(self) -> None:
        super().__init__()
        self.gives, self.takes, self.last = Nests.Gives(), Nests.Takes(), nn.Linear(6, 6)

    def forward(self, batch: dict[str, Any], *more: Any, mask: Any = None) -> dict[str, Any]:
        given = self.gives(batch)
        pair, number = given["pair"], given["rows"]
        point = Point(pair[0] + more[0][0], None)
        out, named = self.takes(given, point, pair[1])
        assert mask is None
        return {"out": (self.last(out), None), "rows": number, "point": named["point"], **batch}


class Sized(nn.Module):
    """Shapes, factories, branches on the number of dimensions, loops, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("offset", torch.ones(4))
        self.plain = torch.arange(4.0)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, *rest = x.shape
        if x.ndim == 3 and len(rest) == 2:
            x = x.mean(1)
        y = self.a(x).view(n, 2, -1).transpose(1, 2).reshape(len(x), 8)
        y = y + torch.arange(n, device=x.device)[:, None] + torch.zeros(n, 8, dtype=y.dtype)
        y = y + torch.randn(1, 8) + torch.rand(len(x), 8) + torch.rand_like(y)
        y = F.dropout(y, 0.4, self.training)
        z = self.b(y)
        for part in z.chunk(2, dim=1):
            z = torch.cat([part, z], dim=1)
        z = z[:, :4] * self.offset + self.plain
        z[:, 0] += 1
        z += torch.full((n, 4), 0.5) * (z > 0).to(z.dtype)
        return z / math.sqrt(z.shape[-1])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.frozen(x).relu()
        beside = x
        for each in self.layers:
            x = x + each(x)
        with torch.no_grad():
            mean = x.mean()
        return x - mean + beside


class Told(nn.Module):
    """A forward pass with one thing that it does."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.a, self.b, self.does, self.calls = nn.Linear(6, 6), nn.Linear(6, 6), does, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = self.does(self, x)
        return self.b(x)
