"""Models in stages as people write them: the bits of one piece, or one line that says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest_of
from support.everything import EVERYTHING
from support.messages import expect_error
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import quorate
from quorate.errors import CutError

pytestmark = pytest.mark.slow

Batch = list[torch.Tensor]  # images (B, 1, 8, 8), tokens (B, 12), labels (B,)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.parts = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.wide = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.parts(self.norms[0](x)).view(rows, length, 3, 2, width // 2)
        dropped = 0.1 if self.training else 0.0
        heads = F.scaled_dot_product_attention(
            *parts.permute(2, 0, 3, 1, 4), attn_mask=mask, dropout_p=dropped
        )
        x = x + self.dropout(self.joined(heads.transpose(1, 2).reshape(rows, length, width)))
        return x + self.wide(self.norms[1](x))


class Gpt(nn.Module):
    """Tied embedding, a mask that is a buffer and goes to all blocks, shapes that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.places = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.ones(12, 12).tril().bool())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(length))
        for block in self.blocks:
            x = block(x, self.mask[:length, :length])
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def of_words(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    tokens = batch[1][:, : int((batch[1] != 0).sum(1).max())]
    logits, wanted = model(tokens[:, :-1]), tokens[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0)
    return {"loss": loss, "weight": (wanted != 0).sum()}


class Residual(nn.Module):
    """What skips the cut is written in place after it."""

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
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), Residual(), Residual(), *ends)


class Translates(nn.Module):
    """States of an LSTM between stages, in a tuple, and packed sequences within one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8, padding_idx=0)
        self.encoder = nn.LSTM(8, 8, batch_first=True)
        self.decoder = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 30)

    def forward(self, read: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(read), (read != 0).sum(1), batch_first=True, enforce_sorted=False
        )
        states = self.encoder(packed)[1]
        values, _ = self.decoder(self.words(said), states)
        logits: torch.Tensor = self.head(values)
        return logits


def of_translation(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return of_words(lambda said: model(batch[1], said), batch)  # type: ignore[arg-type]


class Sees(nn.Module):
    """A dictionary in, another out; numbers of Python's, also such as are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(64, 8)
        self.above = nn.ModuleDict({"classes": nn.Linear(8, 2), "images": nn.Linear(8, 64)})
        self.scale = 0.5

    def forward(self, batch: dict[str, Any], warmth: float = 1.0) -> dict[str, Any]:
        below = self.below(batch["images"].flatten(1)).tanh() / len(batch["images"]) ** 0.5
        below = below * self.scale - below.mean().item()
        found = {name: above(below) / warmth for name, above in self.above.items()}
        return {**found, "below": (below, None), "two": 2}


def of_both(model: nn.Module, batch: Batch) -> torch.Tensor:
    found = model({"images": batch[0], "nothing": None}, warmth=1 + float(batch[2].sum()))
    of_classes = F.cross_entropy(found["classes"], batch[2])
    return of_classes + found["two"] * F.mse_loss(found["images"], batch[0].flatten(1))


def parametrized() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(64, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.Linear(8, 2),
    )


class Recomputes(nn.Module):
    """A part of each stage is computed again in its backward pass, with the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return values


def recomputing() -> nn.Module:
    both = Recomputes(), Recomputes()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *both, nn.Linear(8, 2))


class Frozen(nn.Module):
    """A first stage without any gradient, one layer of which stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        self.backbone = nn.Sequential(*layers).requires_grad_(False)
        self.adapter = nn.Linear(144, 8)
        self.head = nn.Linear(8, 2)
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone[1].eval()
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = self.backbone(images)
        logits: torch.Tensor = self.head(self.adapter(seen).relu())
        return logits


class Experts(nn.Module):
    """Rows go to experts; one that gets none is not called, which differs from shard to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, mixed = self.gate(x).argmax(1), x.clone()
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                mixed[rows] = expert(x[rows])
        return mixed


class Routed(nn.Module):
    """The same, in the forward pass of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(64, 8)
        self.parts = Experts()
        self.head = nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(Experts.forward(self.parts, self.below(images.flatten(1))))
        return logits


def routed_within() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Experts(), nn.Linear(8, 2))


def of_classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[2])


class Case(NamedTuple):
    """A model, its loss, and where it is cut."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Any]
    split: list[str]


def trained(case: Case, pipeline: str | None) -> str:
    """Train, in stages of that order; None: in one piece."""
    torch.manual_seed(3)
    trainer = quorate.Trainer(
        case.model(),
        case.loss,
        optimizer=quorate.Optimize(lambda p: torch.optim.Adam(p, lr=3e-3), ema_decay=0.9),
        batch_size=24,
        shards=4,
        devices="+".join(["cpu"] * (len(case.split) + 1)) if pipeline else "cpu",
        workers=quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(split=case.split, pipeline=pipeline) if pipeline else None,
    )
    trainer.fit(EVERYTHING.Sentences(60), epochs=1)
    return digest_of(trainer)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(Gpt, of_words, ["blocks.1", "head"]), id="gpt"),
        pytest.param(Case(resnet, of_classes, ["2.norms.1"]), id="resnet"),
        pytest.param(Case(Translates, of_translation, ["decoder"]), id="seq2seq"),
        pytest.param(Case(Sees, of_both, ["above.images"]), id="dictionaries"),
        pytest.param(Case(parametrized, of_classes, ["2", "3"]), id="parametrized"),
        pytest.param(Case(recomputing, of_classes, ["3"]), id="checkpointed"),
        pytest.param(Case(Frozen, of_classes, ["adapter"]), id="frozen"),
        pytest.param(Case(routed_within, of_classes, ["3"]), id="experts"),
    ],
)
def test_the_bits_of_one_piece(case: Case) -> None:
    whole = trained(case, None)
    assert [trained(case, pipeline) for pipeline in ("1f1b", "zero-bubble")] == [whole] * 2


@pytest.mark.usefixtures("way")
def test_a_forward_that_goes_another_way_in_a_later_shard() -> None:
    with expect_error(CutError, name="split") as raised:
        trained(Case(Routed, of_classes, ["head"]), "1f1b")
    assert "test_stages_models.py, line" in str(raised.value)
    assert "stage 0 of 2 (the first modules)" in "\n".join(raised.value.__notes__)
