"""Models, loss functions and datasets whose state workers do not share; and sound ones.

    quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/unshared.py KIND

KIND is a name of ``UNSHARED`` or ``SOUND``.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import quorate
from quorate.transports.processes.worker import here

ROWS, BATCH, FEATURES, CLASSES = 48, 12, 6, 3
Loss = Callable[[nn.Module, Any], torch.Tensor]


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Rows that are the same each time."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, FEATURES, generator=draw)
        self.y = torch.randint(0, CLASSES, (ROWS,), generator=draw).tolist()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.x[row], self.y[row]


class Plain(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


# --- models with a state that is neither parameter nor buffer -----------------------------------


class Counter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class History(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.means.append(float(x.mean()))
        return super().forward(x) + sum(self.means)


class OfTheClass(Plain):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OfTheClass.calls += 1
        return super().forward(x) / OfTheClass.calls


class Initialised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(FEATURES))
        self.is_set = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.shift.data.copy_(x.mean(0))
            self.is_set = True
        return super().forward(x - self.shift)


class Extra(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(self._hook)
        self._store = [1.0]

    def _hook(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        self._store[0] *= 0.9
        return output * self._store[0]

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self._store)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self._store[:] = state.tolist()


class Growing(Plain):
    """A memory that is no buffer yet in the first forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = getattr(self, "seen", torch.zeros(FEATURES))
        self.seen = 0.9 * seen + 0.1 * x.detach().mean(0)
        return super().forward(x - self.seen)


# --- what is drawn or read outside of the shard -------------------------------------------------


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.draw))


class OwnNumpy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.draw = np.random.default_rng(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(self.draw.uniform(0.5, 1))


class Clock(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + time.perf_counter() % 1)


class System(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + int.from_bytes(os.urandom(2)) / 65536)


_calls, _numbers, _random = 0, itertools.count(1), random.Random(4)


def of_a_global(model: nn.Module, batch: Any) -> torch.Tensor:
    global _calls
    _calls += 1
    return plain_loss(model, batch) / _calls


def of_a_count(model: nn.Module, batch: Any) -> torch.Tensor:
    return plain_loss(model, batch) / next(_numbers)


def of_a_random(model: nn.Module, batch: Any) -> torch.Tensor:
    return plain_loss(model, batch) * (1 + _random.random())


def closure() -> Loss:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return plain_loss(model, batch) / calls

    return loss


class WithMemory:
    """A loss function that is an object."""

    def __init__(self) -> None:
        self.average = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        value = plain_loss(model, batch)
        self.average = 0.9 * self.average + 0.1 * value.item()
        return value / self.average


class ByProcess(Plain):
    """Another model in each process, where the first shard's gradient does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.number = float(os.getpid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + (self.number if FIRST not in x else 0.0))


FIRST = Rows().x[0, 0]  # a row of the first shard, if rows are not shuffled


class Drawing(Rows):
    """Rows that have noise of a generator of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(3)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.x[row] + torch.rand(FEATURES, generator=self.draw), self.y[row]


class Once(Rows):
    """Rows that are other ones from the second time on."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[int] = set()

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        is_new = row not in self.asked
        self.asked.add(row)
        return self.x[row] if is_new else -self.x[row], self.y[row]


class SlowlyOnce(Once):
    """The same, of rows that take long enough to be loaded ahead, and in a try before that."""

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.001)
        return super().__getitem__(row)


class Remembering(Drawing):
    """Rows that have noise, and are the same as long as no others were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, torch.Tensor] = {}

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if row not in self.last:
            if len(self.last) >= 3:  # rows of a shard
                self.last.clear()
            self.last[row] = super().__getitem__(row)[0]
        return self.last[row], self.y[row]


# name -> model, loss function, dataset, and what is said of it
UNSHARED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Loss], type[Rows], str]] = {
    "counter": (Counter, lambda: plain_loss, Rows, "calls (Counter, unshared.py:"),
    "history": (History, lambda: plain_loss, Rows, "means (History, unshared.py:"),
    "class": (OfTheClass, lambda: plain_loss, Rows, "OfTheClass.calls (class attribute)"),
    "initialised": (Initialised, lambda: plain_loss, Rows, "is_set (Initialised, unshared.py:"),
    "extra": (Extra, lambda: plain_loss, Rows, "_store (Extra, unshared.py:"),
    "growing": (Growing, lambda: plain_loss, Rows, "seen (Growing, unshared.py:"),
    "generator": (OwnGenerator, lambda: plain_loss, Rows, "draw (OwnGenerator, unshared.py:"),
    "numpy": (OwnNumpy, lambda: plain_loss, Rows, "draw (OwnNumpy, unshared.py:"),
    "clock": (Clock, lambda: plain_loss, Rows, "the model (Clock), unshared.py:"),
    "system": (System, lambda: plain_loss, Rows, "the model (System), unshared.py:"),
    "global": (Plain, lambda: of_a_global, Rows, "'_calls' (unshared.py)"),
    "count": (Plain, lambda: of_a_count, Rows, "'_numbers' (unshared.py)"),
    "random": (Plain, lambda: of_a_random, Rows, "'_random' (unshared.py)"),
    "closure": (Plain, closure, Rows, "'calls' in the closure of the loss function"),
    "object": (Plain, WithMemory, Rows, "the loss function (an object of class WithMemory)"),
    "rows": (Plain, lambda: plain_loss, Drawing, "the dataset (Drawing) gives different values"),
    "once": (Plain, lambda: plain_loss, Once, "the dataset (Once) gives different values"),
    "slowly": (
        Plain,
        lambda: plain_loss,
        SlowlyOnce,
        "the dataset (SlowlyOnce) gives different values",
    ),
    "memory": (Plain, lambda: plain_loss, Remembering, "the dataset (Remembering) gives different"),
}
BY_PROCESS = "number (ByProcess)"  # what is said of "by_process", on worker processes only


class Stopping(Plain):
    """Worker 1 stops for ever when it is to compute what worker 0 computes: in a spot check."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        worker = here()
        if worker is not None and worker.number == 1:
            frames, frame = [], sys._getframe()
            while frame.f_back is not None:
                frame = frame.f_back
                frames.append(frame.f_code.co_filename)
            if any(file.endswith("spot_check.py") for file in frames):
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x)


# --- sound ones ---------------------------------------------------------------------------------


class Caching(Plain):
    """A mask that is made when it is needed first, and a table that is a buffer from then on."""

    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(FEATURES)
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(float(FEATURES)), persistent=False)
        return super().forward(x * self.mask + self.table)


class Rotary(nn.Module):
    """Attention with rotary positions, cached by length, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, dropout=0.1, batch_first=True)
        self.last = nn.Linear(FEATURES, CLASSES)
        self._cached: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None].expand(-1, 4, -1)
        if 4 not in self._cached:
            self._cached[4] = torch.outer(torch.arange(4.0), torch.arange(float(FEATURES))).cos()
        x = x * self._cached[4]
        y: torch.Tensor = self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return y


def layers(more: Callable[[], list[nn.Module]]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(FEATURES, 8), *more(), nn.Linear(8, CLASSES))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1])
        return y


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.relu(self.norm(self.conv(x.view(-1, 1, 2, 3)))), 0.2, self.training)
        z: torch.Tensor = self.last(y.mean((2, 3)))
        return z


class Variational(Plain):
    """It draws in forward, from torch's, Python's and NumPy's generators: all are keyed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + random.random() + float(np.random.rand())
        return super().forward(x + torch.randn(x.shape)) * scale


class Teacher(Plain):
    """A frozen copy that forward averages: it is carried as buffers are."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mine, theirs in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.data
        y: torch.Tensor = self.layer(x) - self.teacher(x).detach()
        return y


SOUND: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "caching": Caching,
    "rotary": Rotary,
    "recurrent": Recurrent,
    "images": Images,
    "variational": Variational,
    "teacher": Teacher,
    "norms": layers(
        lambda: [nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Dropout(0.2), nn.PReLU()]
    ),
    "transformer": layers(
        lambda: [
            nn.Unflatten(1, (1, 8)),
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            nn.Flatten(),
        ]
    ),
    "spectral": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)
    ),
    "weight_norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)
    ),
}


def trainer_of(kind: str, **options: Any) -> tuple[quorate.Trainer, Rows]:
    torch.manual_seed(0)
    loss: Loss = plain_loss
    rows = Rows()
    if kind in UNSHARED:
        model, make_loss, dataset, _ = UNSHARED[kind]
        loss, rows = make_loss(), dataset()
    else:
        model = {**SOUND, "by_process": ByProcess, "stopping": Stopping}[kind]
    trainer = quorate.Trainer(
        model(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=BATCH,
        shards=4,
        **options,
    )
    return trainer, rows


if __name__ == "__main__":
    trainer, rows = trainer_of(sys.argv[1])
    trainer.fit(rows, epochs=2, shuffle=False)
