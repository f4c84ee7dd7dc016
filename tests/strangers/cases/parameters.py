"""Trained parameters that are written outside of the update."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from case import SAID, SAME, Case, case, cross_entropy, mlp, tokens, vectors
from torch import nn


class Renormed(nn.Linear):
    """EEGNet's constraint, as most write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


@case
def renorm_data_in_forward() -> Case:
    return Case(nn.Sequential(Renormed(8, 16), nn.ELU(), Renormed(16, 3)), cross_entropy, vectors())


@case
def renorm_in_place_no_grad() -> Case:
    class InPlace(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.copy_(torch.renorm(self.weight, p=2, dim=0, maxnorm=0.3))
            return super().forward(x)

    return Case(nn.Sequential(InPlace(8, 16), nn.ELU(), nn.Linear(16, 3)), cross_entropy, vectors())


@case
def embedding_max_norm() -> Case:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 16, max_norm=1.0)
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x).mean(1))

    return Case(Words(), cross_entropy, tokens())


@case
def embedding_bag_max_norm() -> Case:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.EmbeddingBag(20, 16, max_norm=1.0, mode="sum")
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    return Case(Bag(), cross_entropy, tokens())


@case
def clamp_weights_in_forward() -> Case:
    class Positive(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.clamp_(min=0)
            return super().forward(x)

    return Case(
        nn.Sequential(Positive(8, 16), nn.ReLU(), Positive(16, 3)), cross_entropy, vectors()
    )


@case
def late_constraint() -> Case:
    """Writes only when a norm is passed, which takes some updates."""

    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(self.weight.detach().norm()) > 2.2:
                self.weight.data.mul_(0.9)
            return super().forward(x)

    return Case(
        nn.Sequential(Late(8, 16), nn.ReLU(), nn.Linear(16, 3)), cross_entropy, vectors(),
        partial(torch.optim.SGD, lr=1.0), plain=False, outcomes=(SAME, SAID), names="weight",
    )  # fmt: skip


@case
def actnorm() -> Case:
    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not bool(self.ready):
                self.shift.data = -x.detach().mean(0)
                self.scale.data = 1 / (x.detach().std(0) + 1e-6)
                self.ready.fill_(True)
            return (x + self.shift) * self.scale

    return Case(nn.Sequential(ActNorm(), *mlp()), cross_entropy, vectors(), plain=False)


@case
def alias_by_data() -> Case:
    """Two layers tied by their data."""

    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight.data = self.a.weight.data
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.b(torch.tanh(self.a(x))))

    return Case(Aliased(), cross_entropy, vectors(), outcomes=(SAME, "refused"), names="weight")


@case
def buffer_is_a_view() -> Case:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)
            self.register_buffer("first", self.layer.weight.data[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.first.sum()

    return Case(Viewed(), cross_entropy, vectors(), outcomes=(SAME, "refused"), names="first")


@case
def strided_view_of_images() -> Case:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.conv(x)
            flat = out.as_strided((out.shape[0], 144), (144, 1))
            return self.head(flat)

    from case import images

    return Case(Strided(), cross_entropy, images(), outcomes=(SAME,))


@case
def complex_weights() -> Case:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat) * 0.3)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))

    return Case(Spectral(), cross_entropy, vectors(), optimize={"clip_norm": 0.1})


@case
def sparse_embedding() -> Case:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16, sparse=True), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x).mean(1))

    return Case(Sparse(), cross_entropy, tokens())


@case
def expanded_parameter() -> Case:
    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1).expand(8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x * self.scale)

    return Case(
        Expanded(), cross_entropy, vectors(), plain=False, outcomes=(SAME, "refused"), names="scale"
    )


@case
def functional_max_norm() -> Case:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(20, 16))
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(F.embedding(x, self.table, max_norm=1.0).mean(1))

    return Case(Functional(), cross_entropy, tokens())
