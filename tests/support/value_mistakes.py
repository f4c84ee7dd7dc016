"""Scripts with a mistake without an error, and sound scripts that resemble such a mistake.

Each is a training in a few lines, as people write it.
"""

import copy
import functools
import logging
import warnings
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Script:
    """A training.

    Args:
        model: a module or a function that makes a module; None: ``mlp``.
        names: the name required in the line, beside the line's subject.
    """

    loss: Any
    model: Any = None
    optimizer: Any = SGD
    names: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


SCRIPTS: dict[str, tuple[str, Script]] = {}


def add(about: str, scripts: dict[str, Any]) -> None:
    """List scripts, or loss functions, with the required line."""
    for name, each in scripts.items():
        assert name not in SCRIPTS
        SCRIPTS[name] = about, each if isinstance(each, Script) else Script(each)


def said_of(script: Script, *, strict: bool = False) -> tuple[list[str], str]:
    """Train a script; return the printed lines about values, and the final error."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("quorate").addHandler(handler)
    error = ""
    defaults = {"batch_size": 24, "shards": 4, "workers": 1, "devices": "cpu"}
    settings = {**defaults, **script.settings, "compute": quorate.Compute(strict=strict)}
    try:
        torch.manual_seed(0)
        model = copy.deepcopy(script.model) if script.optimizer is SGD else script.model
        loss = copy.deepcopy(script.loss)  # modules of the script are made when the script runs
        trainer = quorate.Trainer(
            mlp if model is None else model, loss, optimizer=script.optimizer, **settings
        )
        for _ in trainer.updates(vectors(), steps=2):
            pass
    except quorate.UserError as raised:
        error = str(raised)
    finally:
        logging.getLogger("quorate").removeHandler(handler)
    return [line for line in lines if line.startswith("values in doubt")], error


def is_right(about: str, said: tuple[list[str], str], names: str = "") -> bool:
    """Return whether the lines for a script are the required lines, and nothing else."""
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


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def normed() -> nn.Sequential:
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def entropy(model: nn.Module, batch: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], **options)


# --- a GradScaler left in the loss ----------------------------------------------------------------


def scaler(**options: Any) -> torch.amp.GradScaler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.amp.GradScaler("cpu", **options)


GLOBAL = scaler()


def bound(scale: Any) -> Any:
    return lambda m, b: scale(entropy(m, b))


add(
    SCALED,
    {
        "scaler in a global": Script(
            lambda m, b: GLOBAL.scale(entropy(m, b)), names="value_mistakes.py"
        ),
        "scaler's bound method": bound(scaler().scale),
        "scaler in a dict": lambda m, b: {
            "loss": GLOBAL.scale(entropy(m, b)),
            "entropy": entropy(m, b),
        },
        "scaler by its scale": lambda m, b: entropy(m, b) * GLOBAL.get_scale(),
    },
)

# --- a sum over the rows as the loss --------------------------------------------------------------

add(
    SUM,
    {
        "sum of cross entropy": Script(
            lambda m, b: entropy(m, b, reduction="sum"),
            names="cross_entropy(reduction='sum') at value_mistakes.py",
        ),
        "sum with a norm and dropout": Script(
            lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").sum(),
            normed,
            names="sum() at",
        ),
        "sum of squares": lambda m, b: (m(b[0]) - F.one_hot(b[1], 3)).square().sum(),
        "sum divided by the global batch": lambda m, b: entropy(m, b, reduction="sum") / 24,
        # The weight belongs to a mean.
        "sum with a weight": lambda m, b: {
            "loss": entropy(m, b, reduction="sum"),
            "weight": len(b[0]),
        },
        # Without shards: V is the number of workers, whatever its value elsewhere.
        "sum on one worker": Script(
            lambda m, b: entropy(m, b, reduction="sum"), settings={"shards": None}
        ),
    },
)

# --- outside the model ----------------------------------------------------------------------------

OUTER = nn.Parameter(torch.ones(3))


def with_head(head: nn.Module) -> Any:
    return lambda m, b: F.cross_entropy(head(m(b[0])), b[1])


class ScaledLoss:
    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.ones(3))

    def __call__(self, m: nn.Module, b: Any) -> torch.Tensor:
        return F.cross_entropy(m(b[0]) * self.scale, b[1])


add(
    OUTSIDE,
    {
        "outside parameter in a global": Script(
            lambda m, b: F.cross_entropy(m(b[0]) * OUTER, b[1]), names="'OUTER' in"
        ),
        "outside head": Script(with_head(nn.Linear(3, 3)), names="'head'"),
        "outside attribute of the loss": Script(ScaledLoss(), names="scale"),
    },
)

# --- parameters without an optimizer --------------------------------------------------------------

add(
    UNTRAINED,
    {
        "untrained biases": Script(
            entropy,
            optimizer=lambda ps: torch.optim.AdamW([p for p in ps if p.dim() > 1]),
            names="0.bias",
        )
    },
)

# --- a queue whose parts several shards write -----------------------------------------------------


class Queue(nn.Module):
    """Keeps keys of the last 24 rows as in MoCo: columns of a buffer, or rows of a buffer."""

    def __init__(self, *, in_columns: bool = True) -> None:
        super().__init__()
        self.net, self.in_columns = mlp(), in_columns
        keys = F.normalize(torch.randn(24, 3), dim=1)
        self.register_buffer("queue", keys.T.contiguous() if in_columns else keys)
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.normalize(self.net(x), dim=1)
        keys = self.queue.T if self.in_columns else self.queue
        logits = out @ keys.clone().T
        at, n = int(self.at), len(x)
        with torch.no_grad():
            keys[at : at + n] = out.detach()
            self.at.fill_((at + n) % 24)
        return logits


def spread(m: nn.Module, b: Any) -> torch.Tensor:
    return m(b[0]).logsumexp(1).mean()


def queue(shards: int, **options: Any) -> Script:
    made = functools.partial(Queue, **options)
    return Script(spread, made, names="shards=1", settings={"shards": shards})


add(
    QUEUE,
    {
        "queue of columns in 2 shards": queue(2),
        "queue of rows in 6 shards": queue(6, in_columns=False),
    },
)

# --- sound, though they resemble a mistake --------------------------------------------------------

CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


class Towers(nn.Module):
    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.one, self.other = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = F.normalize(self.one(x), dim=1), F.normalize(self.other(x + 0.1), dim=1)
        return one @ other.T / self.temperature


def clip(m: nn.Module, b: Any) -> torch.Tensor:
    return F.cross_entropy(m(b[0]), torch.arange(len(b[0])))


FROZEN = normed()
FROZEN[0].requires_grad_(False)
for rows, temperature in ((2, 0.07), (3, 10.0), (24, 1.0)):
    contrast = Script(
        clip,
        functools.partial(Towers, temperature),
        settings={"shards": 48 // rows, "batch_size": 48},
    )
    add(SOUND, {f"sound contrast of {rows} rows at {temperature}": contrast})
add(
    SOUND,
    {
        "sound sum by its rows": lambda m, b: entropy(m, b, reduction="sum") / len(b[0]),
        "sound frozen part": Script(
            entropy,
            FROZEN,
            lambda _: torch.optim.Adam(p for p in FROZEN.parameters() if p.requires_grad),
        ),
        "sound dropout and batch norm": Script(entropy, normed),
        "sound weighted classes": lambda m, b: {
            "loss": entropy(m, b, weight=CLASS_WEIGHTS),
            "weight": CLASS_WEIGHTS[b[1]].sum(),
        },
        "sound gather that sums": quorate.Gather(
            lambda m, b: (m(b[0]), b[1]),
            lambda _, rows: F.cross_entropy(*rows, reduction="sum") / 24,
        ),
        "sound scaler that is off": bound(scaler(enabled=False).scale),
        "sound queue with one shard": queue(1),
    },
)
