"""Models and losses that are as they should be: the same bits everywhere, and nobody is warned."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import Case, case, cross_entropy, images, mlp, tokens, vectors
from torch import nn
from torch.nn.utils import parametrizations


@case
def plain_mlp() -> Case:
    return Case(mlp(), cross_entropy, vectors())


@case
def cnn_batchnorm() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip
    return Case(model, cross_entropy, images())


@case
def dropout() -> Case:
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3))
    return Case(model, cross_entropy, vectors(), plain=False)


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12, padding_idx=0)
        self.rnn = kind(12, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(self.embed(x))
        return self.head(out[:, -1])


@case
def lstm() -> Case:
    return Case(Tagger(nn.LSTM), cross_entropy, tokens(), partial(torch.optim.Adam, lr=1e-2))


@case
def gru() -> Case:
    return Case(Tagger(nn.GRU), cross_entropy, tokens(), partial(torch.optim.RMSprop, lr=1e-3))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.register_buffer("position", torch.randn(10, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


@case
def transformer() -> Case:
    return Case(
        Transformer(), cross_entropy, tokens(), partial(torch.optim.AdamW, lr=1e-3), plain=False
    )


class Rotary(nn.Module):
    """Keeps tables that are made at the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)
        self.cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cached is None or self.cached.shape[0] != x.shape[1]:
            angles = torch.arange(x.shape[1])[:, None] / 10 ** (torch.arange(8) / 8)
            self.cached = torch.cat([angles.sin(), angles.cos()], 1)
        h = self.embed(x)
        weights = (self.q(h) * self.cached) @ (self.k(h) * self.cached).transpose(1, 2)
        return self.head((weights.softmax(-1) @ h).mean(1))


@case
def rotary_cache() -> Case:
    return Case(Rotary(), cross_entropy, tokens())


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, logvar = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (logvar / 2).exp()
        return self.decode(z), mean, logvar


def elbo(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    out, mean, logvar = model(batch[0])
    kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(1).mean()
    return {"loss": F.mse_loss(out, batch[0]) + 0.1 * kl, "kl": kl}


@case
def vae() -> Case:
    return Case(VAE(), elbo, vectors(), partial(torch.optim.Adam, lr=1e-2), plain=False)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([x, t[:, None]], 1))


def diffusion_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch[0]
    t, noise = torch.rand(len(x)), torch.randn_like(x)
    return F.mse_loss(model(x * (1 - t[:, None]) + noise * t[:, None], t), noise)


@case
def diffusion() -> Case:
    return Case(
        Denoiser(), diffusion_loss, vectors(), partial(torch.optim.Adam, lr=1e-2), plain=False
    )


class Adversaries(nn.Module):
    """A generator and who judges it; the judge's gradient reaches the generator turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8)
        )
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.generator(torch.randn(len(x), 4))
        turned = 2 * made.detach() - made
        return self.judge(x + 0.1 * torch.rand_like(x)), self.judge(turned)


def adversarial(model: nn.Module, batch: Any) -> torch.Tensor:
    real, made = model(batch[0])
    kept = torch.bernoulli(torch.full_like(real, 0.9))  # labels that are smoothed at random
    return F.binary_cross_entropy_with_logits(real, kept) + F.softplus(made).mean()


@case
def gan() -> Case:
    return Case(Adversaries(), adversarial, vectors(), plain=False)


def ddpm_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Ho et al., Denoising Diffusion Probabilistic Models, 2020: the simple loss."""
    x = batch[0]
    left = torch.cumprod(1 - torch.linspace(1e-4, 0.2, 50), 0)
    t = torch.randint(0, 50, (len(x),))
    noise, kept = torch.randn_like(x), left[t][:, None]
    return F.mse_loss(model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t / 50), noise)


@case
def ddpm() -> Case:
    return Case(Denoiser(), ddpm_loss, vectors(), partial(torch.optim.Adam, lr=1e-2), plain=False)


class Words(nn.Module):
    """Embeddings, attention blocks with three dropouts each, and an output per token."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(10, 16)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=causal
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 20)
        self.causal = causal

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        length = ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1) if self.causal else None
        return self.out(self.blocks(x, mask=mask, is_causal=self.causal))


def masked_words(model: nn.Module, batch: Any) -> torch.Tensor:
    """As BERT is trained: some words are hidden, and guessed."""
    ids = batch[0]
    hidden = torch.rand(ids.shape) < 0.3
    logits = model(ids.masked_fill(hidden, 0))
    losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    return (losses * hidden.flatten()).mean()


def next_words(model: nn.Module, batch: Any) -> torch.Tensor:
    """As GPT-2 is trained."""
    ids = batch[0]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@case
def bert_like() -> Case:
    return Case(Words(causal=False), masked_words, tokens(), plain=False)


@case
def gpt2_like() -> Case:
    return Case(Words(causal=True), next_words, tokens(), plain=False)


@case
def gumbel_vq() -> Case:
    class Quantiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits, self.codes = nn.Linear(8, 6), nn.Embedding(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gumbel_softmax(self.logits(x), hard=True) @ self.codes.weight

    return Case(Quantiser(), lambda m, b: F.mse_loss(m(b[0]), b[0]), vectors(), plain=False)


@case
def tied_weights() -> Case:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x).mean(1))

    return Case(Tied(), lambda m, b: F.cross_entropy(m(b[0]), b[0][:, 0]), tokens())


@case
def new_weight_norm() -> Case:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 3)
    )
    return Case(model, cross_entropy, vectors())


@case
def new_spectral_norm() -> Case:
    layer = parametrizations.spectral_norm(nn.Linear(8, 16))
    return Case(
        nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 3)), cross_entropy, vectors(), plain=False
    )


@case
def orthogonal() -> Case:
    layer = parametrizations.orthogonal(nn.Linear(8, 8, bias=False))
    return Case(nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 3)), cross_entropy, vectors())


@case
def gradient_penalty() -> Case:
    def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + 0.1 * grad.square().sum(1).mean()

    return Case(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), penalised, vectors())


@case
def checkpointed() -> Case:
    from torch.utils.checkpoint import checkpoint

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
            )
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return Case(Deep(), cross_entropy, vectors(), plain=False)


@case
def vmapped_per_sample() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        from torch.func import functional_call, vmap

        state = dict(model.named_parameters())
        out = vmap(lambda x: functional_call(model, state, (x[None],))[0])(batch[0])
        return F.cross_entropy(out, batch[1])

    return Case(mlp(), loss, vectors())


@case
def lora_frozen_base() -> Case:
    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(base.in_features, 2) * 0.1)
            self.b = nn.Parameter(torch.zeros(2, base.out_features))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.a @ self.b

    model = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.ReLU(), LoRA(nn.Linear(16, 3)))
    return Case(model, cross_entropy, vectors(), partial(torch.optim.AdamW, lr=1e-2))


@case
def clipped_and_scheduled() -> Case:
    return Case(
        mlp(), cross_entropy, vectors(), partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        optimize={
            "clip_norm": 0.5,
            "schedule": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12),
        },
    )  # fmt: skip


@case
def double_precision() -> Case:
    data = vectors()
    data.tensors = (data.tensors[0].double(), data.tensors[1])
    return Case(mlp().double(), cross_entropy, data, partial(torch.optim.Adam, lr=1e-2))


@case
def python_random_jitter() -> Case:
    """Draws from Python's generator in every forward."""
    import random

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, (batch[0] * random.uniform(0.9, 1.1), batch[1]))

    return Case(mlp(), loss, vectors(), plain=False)


@case
def dict_batches() -> Case:
    rows = [{"x": x, "labels": y} for x, y in vectors()]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(model(**batch), labels)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    return Case(Named(), loss, rows)


@case
def masking_in_place() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        x[:, ::3] = 0
        return F.cross_entropy(model(x), y)

    return Case(mlp(), loss, vectors())
