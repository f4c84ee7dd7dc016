"""What shards leave behind: state from the first one on, or another object for a parameter."""

from __future__ import annotations

import copy
import functools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAID, Case, case, cross_entropy, mlp, tokens, vectors
from torch import nn


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@case
def vq_ema_replaces_parameters() -> Case:
    """The codebook of a much copied VQ-VAE: a new Parameter in each forward pass."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.head = nn.Linear(8, 4), nn.Linear(4, 3)
            self.embedding = nn.Embedding(6, 4)
            self.register_buffer("sizes", torch.ones(6))
            self.ema = nn.Parameter(self.embedding.weight.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.enc(x)
            which = torch.cdist(z, self.embedding.weight).argmin(1)
            hot = F.one_hot(which, 6).float()
            quantised = hot @ self.embedding.weight
            if self.training:
                self.sizes = 0.9 * self.sizes + 0.1 * hot.sum(0)
                self.ema = nn.Parameter(0.9 * self.ema + 0.1 * (hot.T @ z).detach())
                self.embedding.weight = nn.Parameter(self.ema / self.sizes[:, None])
            return self.head(z + (quantised - z).detach())

    return Case(
        Quantised(), cross_entropy, vectors(), plain=False, outcomes=(REFUSED,), names="ema"
    )


@case
def weights_tied_in_forward() -> Case:
    """Ties its head anew each time, as it may have been loaded meanwhile."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.head.weight = self.embed.weight
            return self.head(self.embed(x))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0]
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return Case(Tied(), loss, tokens(), outcomes=(REFUSED,), names="head.weight")


@case
def teacher_follows_every_fourth_step() -> Case:
    """Frozen parameters, written by ``.data`` in place, and not in the first steps."""

    class Teaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = mlp(), mlp()
            self.teacher.requires_grad_(False)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.steps += 1
                if int(self.steps) % 4 == 0:
                    for t, s in zip(
                        self.teacher.parameters(), self.student.parameters(), strict=True
                    ):
                        t.data.mul_(0.5).add_(s.data, alpha=0.5)
            return self.student(x) + 0.5 * self.teacher(x)

    return Case(
        Teaching(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="teacher"
    )


@case
def running_maximum() -> Case:
    """Scales by the largest value seen: a second look at the same rows changes nothing."""

    class Scaled(Wrapped):
        largest = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.largest = max(self.largest, float(x.abs().max()))
            return self.net(x / self.largest)

    return Case(Scaled(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="largest")


@case
def anchored_at_the_start() -> Case:
    """L2-SP: the first call of the loss notes where the weights began."""
    start: dict[str, torch.Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if not start:
            start.update((n, p.detach().clone()) for n, p in model.named_parameters())
        far = sum((p - start[n]).square().sum() for n, p in model.named_parameters())
        return cross_entropy(model, batch) + 0.1 * far

    return Case(mlp(), loss, vectors(), plain=False, outcomes=(SAID,), names="start")


@case
def keeps_the_norm_it_began_with() -> Case:
    class Normed(nn.Linear):
        @functools.cached_property
        def first_norm(self) -> torch.Tensor:
            return self.weight.detach().norm(dim=1, keepdim=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.weight / self.weight.norm(dim=1, keepdim=True) * self.first_norm
            return F.linear(x, w, self.bias)

    model = nn.Sequential(Normed(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = partial(torch.optim.SGD, lr=0.5)
    return Case(
        model,
        cross_entropy,
        vectors(),
        optimizer,
        plain=False,
        outcomes=(SAID,),
        names="first_norm",
    )


@case
def born_again_teacher() -> Case:
    """A teacher copied from the model in the first call."""

    class Distill:
        def __init__(self) -> None:
            self.teacher: nn.Module | None = None

        def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if self.teacher is None:
                self.teacher = copy.deepcopy(model).eval().requires_grad_(False)
            out = model(batch[0])
            soft = self.teacher(batch[0]).softmax(1)
            return F.cross_entropy(out, batch[1]) + 0.3 * F.cross_entropy(out, soft)

    return Case(mlp(), Distill(), vectors(), plain=False, outcomes=(SAID,), names="(Distill)")


@case
def function_attribute_warms_up() -> Case:
    """Counts its calls in an attribute of the function; it matters later."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        loss.calls = getattr(loss, "calls", 0) + 1
        value = cross_entropy(model, batch)
        if loss.calls > 20:
            value = value + 0.05 * sum(p.abs().sum() for p in model.parameters())
        return value

    return Case(mlp(), loss, vectors(), plain=False, outcomes=(SAID,), names="calls")


@case
def weights_cached_by_lru() -> Case:
    """A basis made of the weights once, in a cache of functools on the class."""

    class Basis(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

        @functools.lru_cache(maxsize=8)  # noqa: B019
        def basis(self) -> torch.Tensor:
            return torch.linalg.qr(self.a.weight.detach())[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)) @ self.basis())

    return Case(Basis(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="basis")


@case
def loss_object_keeps_its_output() -> Case:
    class Criterion:
        def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.out = model(batch[0])
            return F.cross_entropy(self.out, batch[1]) + self.small()

        def small(self) -> torch.Tensor:
            return 0.1 * self.out.square().mean()

    return Case(mlp(2048), Criterion(), vectors())


@case
def loss_method_keeps_its_output() -> Case:
    """As in an experiment that is a class: one method hands the output to the next."""

    class Experiment:
        def step(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.out = model(batch[0])
            self.total = F.cross_entropy(self.out, batch[1])
            self.penalty()
            return self.total

        def penalty(self) -> None:
            self.total = self.total + 0.1 * self.out.square().mean()

    return Case(mlp(2048), Experiment().step, vectors())


@case
def integer_buffer_becomes_float() -> Case:
    class Decays(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen * 0.9 + len(x)
            return self.net(x) * (1 - 1 / (1 + self.seen))

    return Case(Decays(), cross_entropy, vectors(), outcomes=(REFUSED,), names="seen")


@case
def moco() -> Case:
    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = mlp(), mlp()
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                b.data.copy_(a.data)
                b.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(3, 32), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = F.normalize(self.q(x), dim=1)
            with torch.no_grad():
                for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                    b.data = b.data * 0.9 + a.data * 0.1
                k = F.normalize(self.k(x.flip(1)), dim=1)
            positive = (q * k).sum(1, keepdim=True)
            logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / 0.2
            at = int(self.queue_ptr)
            self.queue[:, at : at + len(k)] = k.T
            self.queue_ptr[0] = (at + len(k)) % 32
            return logits

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))

    # The queue becomes the mean over shards, which a line says; bits are the same.
    return Case(MoCo(), loss, vectors(), plain=False)
