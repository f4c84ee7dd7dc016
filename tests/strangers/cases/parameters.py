"""Trained parameters: written, replaced, or made outside of the update."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAID, SAME, Case, case, forward, loss, module, tokens
from torch import Tensor, nn

WRITES = "forward writes"


def writing(name: str, write: Callable[[nn.Linear], None], **more: Any) -> None:
    """List a network whose last layer writes the weight in forward, as a plain loop would."""

    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            write(self)
            return super().forward(x)

    def make() -> Case:
        model = nn.Sequential(nn.Linear(8, 16), nn.ELU(), Writing(16, 3))
        optimizer = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
        return Case(SAME, says=WRITES, model=model, optimizer=optimizer, **more)

    case(make, name)


def renorm(layer: nn.Linear) -> None:
    """Apply EEGNet's constraint, as in most scripts."""
    layer.weight.data = torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.3)


writing("renorm_data_in_forward", renorm)
writing("renorm_data_in_forward_bf16", renorm, settings={"precision": "bf16"}, plain=False)
writing("clamped_by_a_copy", lambda layer: layer.weight.data.copy_(layer.weight.clamp(-0.1, 0.1)))
# The clamp changes nothing at first.
writing("clamped_from_some_update_on", lambda layer: layer.weight.data.clamp_(-0.3, 0.3))


class Shrinking(nn.Linear):
    """Shrinks trained values every third step: all replicas have the same parameters."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if int(self.steps) % 3 == 0:
            self.weight.data[1, 1] *= -0.5
        return super().forward(x)


LATE = "now and did not in the first shard"
module("shrinks_every_third_step", SAID, f"forward writes weight (Shrinking) {LATE}")(Shrinking)


def unset() -> dict[str, Any]:
    shift, scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
    return {"shift": shift, "scale": scale, "ready": torch.tensor(False)}


@forward(says=WRITES, state=unset, plain=False)
def actnorm(self: Any, x: Tensor) -> Tensor:
    """Scale and shift by the first rows: by the rows of the first shard."""
    if not bool(self.ready):
        self.shift.data = -x.detach().mean(0)
        self.scale.data = 1 / (x.detach().std(0) + 1e-6)
        self.ready.fill_(True)
    return self.net((x + self.shift) * self.scale)


class Words(nn.Module):
    """The mean of embeddings; some embeddings bound the norms."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = embed, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.embed(x)
        return self.head(found.mean(1) if found.dim() == 3 else found)


@case
def embedding_max_norm() -> Case:
    model = Words(nn.Embedding(20, 16, max_norm=1.0))
    return Case(SAME, says=WRITES, model=model, data=tokens())


# --- other objects in the place of parameters -----------------------------------------------------


class Tying(nn.Module):
    """Ties the head anew each time, as the head may have been loaded meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight = self.embed.weight
        return self.head(self.embed(x))


@loss(REFUSED, "parameter 'head.weight': got another parameter", model=Tying, data=tokens)
def weights_tied_in_forward(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


@forward(REFUSED, "parameter 'scale': got a new parameter")
def parameter_made_in_forward(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "scale"):
        self.scale = nn.Parameter(torch.rand(x.shape[1]))
    return self.net(x * self.scale)


# --- parameters with odd places in memory ---------------------------------------------------------


def spectral_filter() -> dict[str, Any]:
    return {"filter": nn.Parameter(torch.randn(5, dtype=torch.cfloat) * 0.3)}


@forward(state=spectral_filter, optimize={"clip_norm": 0.1})
def complex_weights(self: Any, x: Tensor) -> Tensor:
    return self.net(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))


@forward()
def reads_its_input_by_data(self: Any, x: Tensor) -> Tensor:
    """Name ``.data``, as a writer does."""
    return self.net(x.data)
