"""Switches of the whole process, turned inside of forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAID, SAME, Case, case, cross_entropy, mlp, tokens, vectors
from torch import nn

ANY = (SAME, SAID)


@case
def attention_kernel_chosen() -> Case:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            with sdpa_kernel(SDPBackend.MATH):
                h = F.scaled_dot_product_attention(h, h, h)
            return self.head(h.mean(1))

    return Case(Attends(), cross_entropy, tokens(), outcomes=ANY)


@case
def mkldnn_off_for_a_layer() -> Case:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.backends.mkldnn.flags(enabled=False):
                h = self.conv(x)
            return self.head(h.flatten(1))

    from case import images

    return Case(Off(), cross_entropy, images(), outcomes=ANY)


@case
def default_dtype_in_forward() -> Case:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            scale = torch.ones(8).cumsum(0)
            torch.set_default_dtype(before)
            return self.net((x * (1 / scale)).float())

    return Case(Double(), cross_entropy, vectors(), outcomes=ANY)


@case
def threads_set_in_forward() -> Case:
    class Threads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_num_threads(1)
            return self.net(x)

    return Case(Threads(), cross_entropy, vectors(), outcomes=ANY)


@case
def two_threads_and_index_put() -> Case:
    """Adds to few rows of a table from many places, on two threads."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 64))
            self.head = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table[x.repeat(1, 200) % 4].mean(1))

    return Case(
        Table(), cross_entropy, tokens(), outcomes=(SAME, SAID, REFUSED), plain=False,
        options=("--threads", "2"),
    )  # fmt: skip


@case
def grad_mode_left_off() -> Case:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_grad_enabled(True)
            return self.net(x)

    return Case(Leaves(), cross_entropy, vectors(), outcomes=ANY)


@case
def anomaly_mode() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return cross_entropy(model, batch)

    return Case(mlp(), loss, vectors(), outcomes=(SAME, SAID))
