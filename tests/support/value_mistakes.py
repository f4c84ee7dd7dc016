"""Scripts with a mistake that no error shows, and sound ones that resemble such a mistake.

Each is a training in a few lines, as people write it. ``python -m support.value_mistakes`` in
``tests`` runs all of them, and says of each what was said.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

SCALED = "GradScaler"
SUM = "a sum over the rows"
OUTSIDE = "outside the model"
UNTRAINED = "no optimizer has"
QUEUE = "looks like a queue of rows"
SOUND = ""
SGD = functools.partial(torch.optim.SGD, lr=0.01)


@dataclass
class Script:
    """A training.

    Args:
        names: what the line has to name, beside what it is about.
    """

    loss: Any
    model: Any = None
    optimizer: Any = SGD
    data: Any = None
    names: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 2


SCRIPTS: dict[str, tuple[str, Callable[[], Script]]] = {}


def script(about: str) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
    """List a script under its function's name, with what has to be said of it."""

    def listed(make: Callable[[], Script]) -> Callable[[], Script]:
        assert make.__name__ not in SCRIPTS
        SCRIPTS[make.__name__] = about, make
        return make

    return listed


def said_of(make: Callable[[], Script], *, strict: bool = False) -> tuple[list[str], str]:
    """Train a script; return the lines about values that it says, and with which error it ends."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("quorate").addHandler(handler)
    error = ""
    try:
        torch.manual_seed(0)
        case = make()
        settings = {"batch_size": 24, "shards": 4, "workers": 1, "devices": "cpu", **case.settings}
        if strict:
            settings["compute"] = quorate.Compute(strict=True)
        model = mlp() if case.model is None else case.model
        trainer = quorate.Trainer(model, case.loss, optimizer=case.optimizer, **settings)
        for _ in trainer.updates(vectors() if case.data is None else case.data, steps=case.steps):
            pass
    except quorate.UserError as raised:
        error = str(raised)
    finally:
        logging.getLogger("quorate").removeHandler(handler)
    found = [line for line in lines if line.startswith("values in doubt")]
    return found, error


def is_right(about: str, said: tuple[list[str], str], names: str = "") -> bool:
    """Return whether what was said of a script is what has to be said of it, and nothing else."""
    lines, error = said
    if about == SOUND:
        return not lines and not error
    told = [*lines, *([error] if error else [])]
    return len(told) == 1 and about in told[0] and names in told[0]


# --- data and models ------------------------------------------------------------------------------


def vectors(rows: int = 96) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=g)
    return TensorDataset(x, (x @ torch.randn(8, 3, generator=g)).argmax(1))


def pictures(rows: int = 96) -> TensorDataset:
    g = torch.Generator().manual_seed(2)
    x = torch.rand(rows, 1, 8, 8, generator=g)
    return TensorDataset(x, torch.randint(0, 3, (rows,), generator=g))


def sentences(rows: int = 96) -> TensorDataset:
    """Tokens of lengths between 1 and 10, padded with 0."""
    g = torch.Generator().manual_seed(3)
    x = torch.randint(1, 20, (rows, 10), generator=g)
    return TensorDataset(x * (torch.arange(10) < torch.randint(1, 11, (rows, 1), generator=g)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def normed() -> nn.Sequential:
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    return nn.Sequential(*layers)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 8), nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mu, logvar = self.encode(x.flatten(1)).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return torch.sigmoid(self.decode(z)), mu, logvar


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(ids))


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu")


# --- a GradScaler that is left in the loss --------------------------------------------------------

GLOBAL = scaler()


@script(SCALED)
def scaler_in_a_global() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return GLOBAL.scale(entropy(model, batch))

    return Script(loss, names="value_mistakes.py")


@script(SCALED)
def scaler_in_a_closure() -> Script:
    own = scaler()
    return Script(lambda model, batch: own.scale(entropy(model, batch)))


@script(SCALED)
def scaler_bound_method() -> Script:
    scale = scaler().scale
    return Script(lambda model, batch: scale(entropy(model, batch)))


@script(SCALED)
def scaler_as_attribute_of_an_object() -> Script:
    class Criterion:
        def __init__(self) -> None:
            self.scaler = scaler()

        def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return self.scaler.scale(entropy(model, batch))

    return Script(Criterion())


@script(SCALED)
def scaler_in_a_bound_loss() -> Script:
    class Task:
        scaler = scaler()

        def step(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": self.scaler.scale(entropy(model, batch))}

    return Script(Task().step)


@script(SCALED)
def scaler_of_torch_cuda_amp() -> Script:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and switched off without CUDA
        old = type(
            "Scaler", (torch.cuda.amp.GradScaler,), {"__init__": torch.amp.GradScaler.__init__}
        )
        own = old("cpu")
    return Script(lambda model, batch: own.scale(entropy(model, batch)))


@script(SCALED)
def scaler_of_torch_cpu_amp() -> Script:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = torch.cpu.amp.GradScaler()
    return Script(lambda model, batch: own.scale(entropy(model, batch)))


@script(SCALED)
def scaler_as_default_argument() -> Script:
    def loss(model: nn.Module, batch: Any, *, scaler: Any = scaler()) -> torch.Tensor:  # noqa: B008
        return scaler.scale(entropy(model, batch))

    return Script(loss)


@script(SCALED)
def scaler_in_a_partial() -> Script:
    def loss(amp: Any, model: nn.Module, batch: Any) -> torch.Tensor:
        return amp.scale(entropy(model, batch))

    return Script(functools.partial(loss, scaler()))


@script(SCALED)
def scaler_in_a_dict() -> Script:
    tools = {"scaler": scaler(), "criterion": nn.CrossEntropyLoss()}

    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        value = tools["criterion"](model(batch[0]), batch[1])
        return {"loss": tools["scaler"].scale(value), "entropy": value}

    return Script(loss)


@script(SCALED)
def scaler_and_autocast() -> Script:
    own = scaler()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = entropy(model, batch)
        return own.scale(value)

    return Script(loss)


@script(SCALED)
def scaler_and_accumulation() -> Script:
    own = scaler()
    return Script(lambda model, batch: own.scale(entropy(model, batch) / 4))


@script(SCALED)
def scaler_of_several_losses() -> Script:
    own = scaler()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return sum(own.scale([F.cross_entropy(out, batch[1]), 0.1 * out.square().mean()]))

    return Script(loss)


@script(SCALED)
def scaler_by_its_scale() -> Script:
    own = scaler()
    return Script(lambda model, batch: entropy(model, batch) * own.get_scale())


@script(SCALED)
def scaler_with_a_small_scale() -> Script:
    own = torch.amp.GradScaler("cpu", init_scale=8.0)
    return Script(lambda model, batch: own.scale(entropy(model, batch)))


@script(SCALED)
def scaler_in_forward() -> Script:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scaler = mlp(), scaler()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.scaler.scale(F.cross_entropy(self.net(x), y))

    return Script(lambda model, batch: model(*batch), Net())


@script(SCALED)
def scaler_as_accelerate_has_it() -> Script:
    accelerator = SimpleNamespace(scaler=scaler())
    accelerator.scaled = lambda value: accelerator.scaler.scale(value)
    return Script(lambda model, batch: accelerator.scaled(entropy(model, batch)))


@script(SCALED)
def scaler_as_fabric_has_it() -> Script:
    class MixedPrecision:
        def __init__(self) -> None:
            self.scaler = scaler()

        def pre_backward(self, tensor: torch.Tensor) -> torch.Tensor:
            return self.scaler.scale(tensor)

    plugin = MixedPrecision()
    return Script(lambda model, batch: plugin.pre_backward(entropy(model, batch)))


@script(SCALED)
def scaler_of_a_gan() -> Script:
    own = scaler()
    models = {"g": nn.Linear(8, 8), "d": nn.Linear(8, 1)}

    def generator(m: Any, batch: Any) -> torch.Tensor:
        return own.scale(F.softplus(-m["d"](m["g"](batch[0]))).mean())

    def critic(m: Any, batch: Any) -> torch.Tensor:
        return own.scale(F.softplus(m["d"](m["g"](batch[0]).detach())).mean())

    return Script({"d": critic, "g": generator}, models, {"d": SGD, "g": SGD})


@script(SCALED)
def scaler_in_a_decorated_loss() -> Script:
    own = scaler()

    def mixed(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(model: nn.Module, batch: Any) -> torch.Tensor:
            return own.scale(function(model, batch))

        return wrapped

    return Script(mixed(entropy))


# --- a loss that is a sum over the rows -----------------------------------------------------------


@script(SUM)
def sum_of_cross_entropy() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return Script(loss, names="cross_entropy(reduction='sum') at value_mistakes.py")


@script(SUM)
def sum_by_a_criterion() -> Script:
    criterion = nn.CrossEntropyLoss(reduction="sum")
    return Script(lambda m, b: criterion(m(b[0]), b[1]), names="reduction='sum'")


@script(SUM)
def sum_by_size_average() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return F.cross_entropy(model(batch[0]), batch[1], size_average=False)

    return Script(loss)


@script(SUM)
def sum_of_a_norm_and_dropout() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none").sum()

    return Script(loss, normed(), names="sum() at")


@script(SUM)
def sum_of_squares() -> Script:
    return Script(lambda m, b: (m(b[0]) - F.one_hot(b[1], 3)).square().sum())


@script(SUM)
def sum_of_torchs_vae_example() -> Script:
    """github.com/pytorch/examples, vae/main.py: Appendix B of Kingma and Welling."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out, mu, logvar = model(batch[0])
        bce = F.binary_cross_entropy(out, batch[0].view(-1, 64), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    return Script(loss, Vae(), data=pictures())


@script(SUM)
def sum_divided_by_the_global_batch() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 24

    return Script(loss)


@script(SUM)
def sum_with_weight_decay() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        decay = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") + 1e-2 * decay

    return Script(loss)


@script(SUM)
def sum_in_a_dict_with_metrics() -> Script:
    def loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        out = model(batch[0])
        right = (out.argmax(1) == batch[1]).float().mean()
        return {"loss": F.nll_loss(out.log_softmax(1), batch[1], reduction="sum"), "right": right}

    return Script(loss)


@script(SUM)
def sum_with_a_weight() -> Script:
    """The weight belongs to a mean."""

    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        value = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return {"loss": value, "weight": len(batch[0])}

    return Script(loss)


@script(SUM)
def sum_over_tokens() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ids = batch[0]
        logits = model(ids[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=0, reduction="sum")

    return Script(loss, Words(), data=sentences())


@script(SUM)
def sum_over_rows_of_means() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return sum(F.cross_entropy(model(x[None]), y[None]) for x, y in zip(*batch, strict=True))

    return Script(loss)


@script(SUM)
def sum_of_a_loop() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        total = torch.zeros(())
        for row, label in zip(model(batch[0]), batch[1], strict=True):
            total = total + F.cross_entropy(row, label)
        return total

    return Script(loss)


@script(SUM)
def sum_times_the_rows() -> Script:
    return Script(lambda m, b: entropy(m, b) * len(b[0]))


@script(SUM)
def sum_of_noise_prediction() -> Script:
    """A diffusion model's loss, of pictures."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].flatten(1)
        noise, t = torch.randn_like(x), torch.rand(len(x), 1)
        return F.mse_loss(model((1 - t) * x + t * noise), noise, reduction="sum")

    return Script(loss, nn.Linear(64, 64), data=pictures())


@script(SUM)
def sum_of_multi_labels() -> Script:
    criterion = nn.BCEWithLogitsLoss(reduction="sum")
    return Script(lambda m, b: criterion(m(b[0]), F.one_hot(b[1], 3).float()))


@script(SUM)
def sum_by_einsum() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return -torch.einsum(
            "nc,nc->", model(batch[0]).log_softmax(1), F.one_hot(batch[1], 3).float()
        )

    return Script(loss)


@script(SUM)
def sum_of_huber_on_one_worker() -> Script:
    """Without shards: V is the number of workers, whatever that is elsewhere."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.huber_loss(model(batch[0]), F.one_hot(batch[1], 3).float(), reduction="sum")

    return Script(loss, settings={"shards": None})


@script(SUM)
def sum_with_own_dropout() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(F.dropout(batch[0], 0.1))
        return F.cross_entropy(out, batch[1], reduction="sum")

    return Script(loss)


@script(SUM)
def sum_in_a_part() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.5 * out.square().sum()

    return Script(loss)


# --- trained by nobody ----------------------------------------------------------------------------

OUTER = nn.Parameter(torch.ones(3))


@script(OUTSIDE)
def outside_parameter_in_a_global() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]) * OUTER, batch[1])

    return Script(loss, names="'OUTER' in")


@script(OUTSIDE)
def outside_tensor_in_a_closure() -> Script:
    temperature = torch.ones((), requires_grad=True)
    return Script(lambda m, b: F.cross_entropy(m(b[0]) / temperature, b[1]), names="'temperature'")


@script(OUTSIDE)
def outside_log_variances() -> Script:
    """Kendall et al., Multi-Task Learning Using Uncertainty, 2018."""
    log_vars = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        losses = F.cross_entropy(out, batch[1]), out.square().mean()
        return sum((-s).exp() * each + s for s, each in zip(log_vars, losses, strict=True))

    return Script(loss, names="2 tensors")


@script(OUTSIDE)
def outside_head() -> Script:
    head = nn.Linear(3, 3)
    return Script(lambda m, b: F.cross_entropy(head(m(b[0])), b[1]), names="'head'")


@script(OUTSIDE)
def outside_center_loss() -> Script:
    class CenterLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x - self.centers[y]).square().sum(1).mean()

    center = CenterLoss()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.1 * center(out, batch[1])

    return Script(loss, names="centers")


@script(OUTSIDE)
def outside_attribute_of_the_loss() -> Script:
    class Criterion:
        def __init__(self) -> None:
            self.scale = nn.Parameter(torch.ones(3))

        def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]) * self.scale, batch[1])

    return Script(Criterion(), names="scale")


@script(OUTSIDE)
def outside_module_as_the_loss() -> Script:
    class Arc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return F.cross_entropy(F.linear(model(batch[0]), F.normalize(self.weight)), batch[1])

    return Script(Arc(), names="weight")


@script(OUTSIDE)
def outside_embedding_table() -> Script:
    table = nn.Embedding(3, 3)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), table(batch[1]))

    return Script(loss, names="'table'")


@script(OUTSIDE)
def outside_in_a_list() -> Script:
    prompts = [torch.zeros(8, requires_grad=True)]
    return Script(lambda m, b: F.cross_entropy(m(b[0] + prompts[0]), b[1]), names="'prompts'")


@script(OUTSIDE)
def outside_in_a_dict_and_a_norm() -> Script:
    extra = {"bias": nn.Parameter(torch.zeros(3))}
    return Script(
        lambda m, b: F.cross_entropy(m(b[0]) + extra["bias"], b[1]), normed(), names="'extra'"
    )


@script(UNTRAINED)
def untrained_head_alone_in_adam() -> Script:
    model = mlp()
    return Script(
        entropy,
        model,
        lambda _: torch.optim.Adam(model[2].parameters()),
        names="2 of the model's 4",
    )


@script(UNTRAINED)
def untrained_first_layer() -> Script:
    model = mlp()
    return Script(
        entropy, model, lambda _: torch.optim.Adam(model[0].parameters()), names="2.weight"
    )


@script(UNTRAINED)
def untrained_biases() -> Script:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.dim() > 1])

    return Script(entropy, optimizer=adamw, names="0.bias")


@script(UNTRAINED)
def untrained_in_groups() -> Script:
    model = normed()

    def sgd(_: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[4].parameters(), "lr": 0.01},
        ]
        return torch.optim.SGD(groups)

    return Script(entropy, model, sgd, names="1.weight")


@script(UNTRAINED)
def untrained_last_parameter() -> Script:
    return Script(entropy, optimizer=lambda ps: torch.optim.SGD(ps[:-1], lr=0.1), names="2.bias")


@script(UNTRAINED)
def untrained_by_name() -> Script:
    model = Words()

    def muon(_: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for n, p in model.named_parameters() if n.startswith("out")])

    def loss(m: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(m(batch[0]).flatten(0, 1), batch[0].flatten())

    return Script(loss, model, muon, sentences(), names="embed.weight")


@script(UNTRAINED)
def untrained_with_adafactor() -> Script:
    model = mlp()
    return Script(
        entropy, model, lambda _: torch.optim.Adafactor(model[2].parameters()), names="0.weight"
    )


@script(UNTRAINED)
def untrained_of_a_gan() -> Script:
    models = {"g": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "d": nn.Linear(8, 1)}

    def generator(m: Any, batch: Any) -> torch.Tensor:
        return F.softplus(-m["d"](m["g"](batch[0]))).mean()

    def critic(m: Any, batch: Any) -> torch.Tensor:
        return F.softplus(m["d"](m["g"](batch[0]).detach())).mean()

    first = {"d": SGD, "g": lambda ps: torch.optim.SGD(ps[:2], lr=0.1)}
    return Script({"d": critic, "g": generator}, models, first, names="g.1.weight")


@script(UNTRAINED)
def untrained_after_a_typo() -> Script:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(x).relu())

    model = Net()

    def adam(_: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([*model.head.parameters()])

    return Script(entropy, model, adam, names="backbone.weight")


@script(UNTRAINED)
def untrained_scale_of_many() -> Script:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 3))
    return Script(entropy, model, lambda ps: torch.optim.SGD(ps[:4], lr=0.1), names="and 6 more")


# --- a queue whose parts several shards write -----------------------------------------------------


class Queue(nn.Module):
    """Keys of the last rows as MoCo keeps them.

    Args:
        shape: of the buffer; keys lie along the dimension that has 24.
        pointer: of the buffer that says where the next ones go; None: the oldest go out in front.
    """

    def __init__(self, shape: tuple[int, ...] = (3, 24), *, pointer: Any = None) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("queue", F.normalize(torch.randn(shape), dim=shape.index(3)))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long) if pointer is None else pointer)
        self.dim = shape.index(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.normalize(self.net(x), dim=1)
        keys = self.queue.clone().movedim(self.dim, 0)
        logits = out @ keys.T
        at, n = int(self.at), len(x)
        with torch.no_grad():
            place = [slice(None)] * self.queue.dim()
            place[self.dim] = slice(at, at + n)
            self.queue[tuple(place)] = (out if self.dim == 0 else out.T).detach()
            self.at.fill_((at + n) % 24)
        return logits


def _queue(make: Callable[[], nn.Module], shards: int = 2, **settings: Any) -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).logsumexp(1).mean()

    return Script(loss, make(), names="shards=1", settings={"shards": shards, **settings})


def _listed(name: str, make: Callable[[], Script]) -> None:
    SCRIPTS[name] = QUEUE, make


for _shards in (2, 3, 4, 6):
    for _shape in ((3, 24), (24, 3)):
        _listed(
            f"queue_of_{_shape[0]}_x_{_shape[1]}_in_{_shards}_shards",
            functools.partial(lambda v, s: _queue(lambda: Queue(s), v), _shards, _shape),
        )
for _number, _pointer in enumerate(
    (torch.zeros((), dtype=torch.long), torch.zeros(1, dtype=torch.int32))
):
    _listed(
        f"queue_with_pointer_{_number}",
        functools.partial(lambda p: _queue(lambda: Queue(pointer=p.clone())), _pointer),
    )


@script(QUEUE)
def queue_of_rows_by_index() -> Script:
    """A memory bank of instance discrimination: Wu et al., 2018."""

    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("bank", torch.randn(96, 3))

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            out = F.normalize(self.net(x), dim=1)
            logits = out @ self.bank.clone().T
            with torch.no_grad():
                self.bank[rows] = 0.5 * self.bank[rows] + 0.5 * out
            return F.cross_entropy(logits, rows)

    def loss(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
        return model(batch[0], torch.from_numpy(at.rows.copy()))

    return Script(loss, Bank(), names="bank")


@script(QUEUE)
def queue_of_pictures() -> Script:
    """A replay of the last inputs."""

    class Replay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(64, 3)
            self.register_buffer("seen", torch.zeros(24, 1, 8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = self.seen[:4].clone()
            self.seen[: len(x)] = x
            return self.net(torch.cat([x, old]).flatten(1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0])[: len(batch[1])], batch[1])

    return Script(loss, Replay(), data=pictures(), names="seen")


@script(QUEUE)
def queue_of_prototypes() -> Script:
    """Codes of a vector quantiser, of which only those that were chosen are moved."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)
            self.register_buffer("codes", torch.randn(64, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            nearest = torch.cdist(out, self.codes.clone()).argmin(1)
            with torch.no_grad():
                for code, row in zip(nearest, out, strict=True):
                    self.codes[code] = 0.9 * self.codes[code] + 0.1 * row
            return (out - self.codes[nearest].clone()).square().mean()

    return Script(lambda m, b: m(b[0]), Codes(), names="codes")


def _two_queues() -> Script:
    """Two encoders, each with a queue of its own."""
    both = nn.ModuleDict({"a": Queue(), "b": nn.Linear(8, 3)})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model["a"](batch[0]).logsumexp(1).mean() + model["b"](batch[0]).square().mean()

    return Script(loss, both, names="a.queue", settings={"shards": 2})


_listed("queue_in_a_part_of_the_model", _two_queues)
for _name, _kind in (
    ("adam", torch.optim.Adam),
    ("adamw", torch.optim.AdamW),
    ("rmsprop", torch.optim.RMSprop),
    ("adagrad", torch.optim.Adagrad),
    ("muon", torch.optim.Adafactor),
    ("lion", torch.optim.NAdam),
):
    _listed(
        f"queue_with_{_name}",
        functools.partial(lambda k: _with_optimizer(_queue(Queue), k), _kind),
    )


def _with_optimizer(made: Script, kind: Any) -> Script:
    made.optimizer = kind
    return made


# --- sound, though they resemble a mistake --------------------------------------------------------


@script(SOUND)
def sound_sum_by_its_rows() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / len(batch[0])

    return Script(loss)


@script(SOUND)
def sound_frozen_part() -> Script:
    model = normed()
    model[0].requires_grad_(False)

    def adam(_: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(p for p in model.parameters() if p.requires_grad)

    return Script(entropy, model, adam)


@script(SOUND)
def sound_every_other_step() -> Script:
    class Twofold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList([mlp(), mlp()])

        def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
            return self.ways[way](x)

    def loss(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0], at.step % 2), batch[1])

    return Script(loss, Twofold(), steps=4)


@script(SOUND)
def sound_dropout_and_batch_norm() -> Script:
    return Script(entropy, normed())


@script(SOUND)
def sound_weighted_tokens() -> Script:
    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        ids, n = batch[0], int((batch[0][:, 1:] > 0).sum())
        logits = model(ids[:, :-1]).flatten(0, 1)
        total = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=0, reduction="sum")
        return {"loss": total / max(n, 1), "weight": n}

    return Script(loss, Words(), data=sentences())


@script(SOUND)
def sound_mean_of_tokens_without_weight() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ids = batch[0]
        logits = model(ids[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=0)

    return Script(loss, Words(), data=sentences())


def _clip(temperature: float, shards: int, batch_size: int = 24) -> Script:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 6), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = F.normalize(self.one(x), dim=1), F.normalize(self.other(x + 0.1), dim=1)
            return one @ other.T / temperature

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), torch.arange(len(batch[0])))

    return Script(loss, Towers(), settings={"shards": shards, "batch_size": batch_size})


for _temperature in (10.0, 1.0, 0.07):
    for _rows in (2, 3, 4, 6, 8, 12, 24, 48):
        SCRIPTS[f"sound_contrast_of_{_rows}_rows_at_{_temperature}"] = (
            SOUND,
            functools.partial(_clip, _temperature, 48 // _rows, 48),
        )


@script(SOUND)
def sound_gather_that_sums() -> Script:
    def represent(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def contrast(_: nn.Module, rows: Any) -> torch.Tensor:
        return F.cross_entropy(*rows, reduction="sum") / 24

    return Script(quorate.Gather(represent, contrast))


@script(SOUND)
def sound_gan_phases() -> Script:
    models = {"g": nn.Linear(8, 8), "d": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))}

    def generator(m: Any, batch: Any) -> torch.Tensor:
        return F.softplus(-m["d"](m["g"](torch.randn_like(batch[0])))).mean()

    def critic(m: Any, batch: Any) -> torch.Tensor:
        made = m["g"](torch.randn_like(batch[0])).detach()
        return F.softplus(m["d"](made)).mean() + F.softplus(-m["d"](batch[0])).mean()

    return Script({"d": critic, "g": generator}, models, {"d": SGD, "g": SGD})


@script(SOUND)
def sound_scaler_that_is_off() -> Script:
    own = torch.amp.GradScaler("cpu", enabled=False)
    return Script(lambda model, batch: own.scale(entropy(model, batch)))


@script(SOUND)
def sound_scaler_without_cuda() -> Script:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = torch.amp.GradScaler("cuda", enabled=torch.cuda.is_available())
    return Script(lambda model, batch: own.scale(entropy(model, batch)))


@script(SOUND)
def sound_scaled_gradient_penalty() -> Script:
    """As torch's page on automatic mixed precision has it: the penalty is unscaled again."""
    own = scaler()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = entropy(model, batch)
        of = [*model.parameters()]
        gradients = torch.autograd.grad(own.scale(value), of, create_graph=True)
        norm = sum((g / own.get_scale()).square().sum() for g in gradients)
        return value + 0.1 * norm

    return Script(loss)


@script(SOUND)
def sound_gradient_penalty_at_a_new_point() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + gradient.square().sum(1).mean()

    return Script(loss)


@script(SOUND)
def sound_adversarial_noise() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.zeros_like(batch[0], requires_grad=True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(batch[0] + noise), batch[1]), noise)
        return F.cross_entropy(model(batch[0] + 0.1 * gradient.sign()), batch[1])

    return Script(loss)


@script(SOUND)
def sound_perceptual_loss() -> Script:
    """A network that compares, in evaluation mode, and is trained by nobody on purpose."""
    judge = mlp().eval()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(judge(batch[0] + model(batch[0]).mean(1, keepdim=True)), judge(batch[0]))

    return Script(loss)


@script(SOUND)
def sound_frozen_judge() -> Script:
    judge = mlp().requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(judge(batch[0] + model(batch[0]).mean(1, keepdim=True)), judge(batch[0]))

    return Script(loss)


@script(SOUND)
def sound_teacher_without_gradient() -> Script:
    model = mlp()
    teacher = copy.deepcopy(model)

    def loss(m: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0]).softmax(1)
        return F.kl_div(m(batch[0]).log_softmax(1), wanted, reduction="batchmean")

    return Script(loss, model)


@script(SOUND)
def sound_mean_with_weight_decay() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return entropy(model, batch) + 10 * sum(p.square().sum() for p in model.parameters())

    return Script(loss)


@script(SOUND)
def sound_vae_of_means() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out, mu, logvar = model(batch[0])
        bce = F.binary_cross_entropy(out, batch[0].flatten(1), reduction="none").sum(1)
        kld = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1)
        return (bce + kld).mean()

    return Script(loss, Vae(), data=pictures())


@script(SOUND)
def sound_noise_prediction() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.randn_like(batch[0])
        t = torch.rand(len(noise), 1)
        return F.mse_loss(model((1 - t) * batch[0] + t * noise), noise)

    return Script(loss, nn.Linear(8, 8))


@script(SOUND)
def sound_policy_gradient() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        gain = out[:, 2].detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        chosen = out.log_softmax(1).gather(1, batch[1][:, None])[:, 0]
        return -((chosen - chosen.detach()).exp() * gain).mean()

    return Script(loss)


@script(SOUND)
def sound_rare_positives() -> Script:
    """A loss of the few rows that have an object, over their number."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        has = batch[0][:, 0] > 1
        error = (model(batch[0]).square().sum(1) * has).sum()
        return error / has.sum().clamp(min=1)

    return Script(loss)


@script(SOUND)
def sound_dice() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out, wanted = model(batch[0]).softmax(1), F.one_hot(batch[1], 3).float()
        return 1 - 2 * (out * wanted).sum() / (out.sum() + wanted.sum())

    return Script(loss)


@script(SOUND)
def sound_triplets() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out, same = model(batch[0]), batch[1][:, None] == batch[1]
        apart = torch.cdist(out, out)
        far, near = (apart - 9 * ~same).amax(1), (apart + 9 * same).amin(1)
        return (far - near + 0.3).relu().mean()

    return Script(loss)


@script(SOUND)
def sound_barlow_twins() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        one, other = (
            F.normalize(model(batch[0] + 0.1 * torch.randn_like(batch[0])), dim=0) for _ in range(2)
        )
        return (one.T @ other - torch.eye(3)).square().sum()

    return Script(loss)


@script(SOUND)
def sound_simclr_with_dropout() -> Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        views = torch.cat([F.dropout(batch[0], 0.2), F.dropout(batch[0], 0.2)])
        out = F.normalize(model(views), dim=1)
        n = len(batch[0])
        logits = (out @ out.T / 0.5).fill_diagonal_(-1e9)
        return F.cross_entropy(logits, (torch.arange(2 * n) + n) % (2 * n))

    return Script(loss)


@script(SOUND)
def sound_sum_with_one_shard() -> Script:
    """A choice: the loss of the whole batch, as in a plain loop."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 24

    return Script(loss, settings={"shards": 1})


@script(SOUND)
def sound_two_optimizers_in_one() -> Script:
    class Both(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            matrices = [p for p in parameters if p.dim() > 1]
            self.first = torch.optim.SGD(matrices, lr=0.01)
            self.second = torch.optim.Adam([p for p in parameters if p.dim() < 2])
            super().__init__(matrices, {"lr": 0.01})

        def step(self, closure: Any = None) -> None:
            self.first.step()
            self.second.step()

    return Script(entropy, optimizer=Both)


@script(SOUND)
def sound_counter_in_the_loss() -> Script:
    calls = {"n": 0, "seen": torch.zeros(())}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls["n"] += 1
        calls["seen"] += len(batch[0])
        return entropy(model, batch)

    return Script(loss)


@script(SOUND)
def sound_queue_with_one_shard() -> Script:
    return _queue(Queue, shards=1)


def main() -> None:
    """Run all scripts, or those whose names have a word in them; say what was said of each."""
    words, wrong = sys.argv[1:], 0
    for name, (about, make) in SCRIPTS.items():
        if words and not any(word in name for word in words):
            continue
        said = said_of(make)
        right = is_right(about, said, make().names)
        wrong += not right
        print(" " if right else "!", name, "|", *said[0], said[1], flush=True)
    print(f"{wrong} of {len(SCRIPTS)} are not as expected")


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
