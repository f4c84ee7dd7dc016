"""A training for ranks of a collective, with mischief; the first argument says which.

    quorate run --engine collective --workers 3 tests/scripts/ranks.py plain adam
    torchrun --nproc-per-node 3 tests/scripts/ranks.py plain adam

Without ``quorate run`` a third argument is the run directory, and "fresh" begins anew there. "one":
forward writes no parameter; the last argument is a folder for notes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.collective.place import own_place

what, optimizer, *rest = sys.argv[1:]
folder = [rest.pop()] if what == "one" else []
run_dir = rest[0] if rest else None
place = own_place()
RANK = 0 if place is None else place.rank
ATTEMPT = "0" if place is None else place.attempt
ROWS, BATCH, SHARDS, STEPS = 96, 24, 4, 8


class Net(nn.Module):
    """BatchNorm, dropout, branches that a shard may take or not, a table that is renormalised."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 300)
        self.norm = nn.BatchNorm1d(300)
        self.left, self.right = nn.Linear(300, 400), nn.Linear(300, 400)
        self.table = nn.Embedding(8, 400, max_norm=None if what == "one" else 0.5)
        self.last = nn.Linear(400, 3 if what != "model" or RANK == 0 else 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm(self.first(x)))
        branch = self.left if float(x[0, 0]) > 0 else self.right
        inner = branch(inner) + self.table((x[:, 1] > 0).long())
        return self.last(F.dropout(F.relu(inner), 0.3, self.training))


def disturb(step: int, row: int) -> None:
    match what, RANK, step:
        case ["raise", 1, 2] if row == 56:
            raise ValueError("mine")
        case ["again", 1, 2] if row == 56:
            seen.append(row)
            if len(seen) == 2:  # the gradient at a point that the optimizer has moved to
                raise ValueError("mine")
        case ["kill", 1, 3] | ["kill0", 0, 3] if ATTEMPT == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        case ["term", 1, 3] if row % BATCH == 6:  # once: the first row of its shard
            os.kill(os.getpid(), signal.SIGTERM)
        case ["term0", 0, 3] if row % BATCH == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        case ["slow", 1, _]:
            time.sleep(0.05)


def look(model: nn.Module) -> None:
    """Write down which memory this rank computes from."""
    address = next(model.parameters()).data_ptr()
    with open("/proc/self/maps") as maps:
        for start, end, inode in (
            (*(int(n, 16) for n in words[0].split("-")), words[4]) for words in map(str.split, maps)
        ):
            if start <= address < end:
                Path(folder[0], f"rank-{RANK}").write_text(inode)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, labels, rows, steps = batch
    for step, row in zip(steps.tolist(), rows.tolist(), strict=True):
        if model.training:
            disturb(step, row)
    if folder and model.training and int(steps[0]) == 3:
        look(model)
    found = F.cross_entropy(model(x), labels)
    if what == "other" and RANK == 1 and model.training and int(steps[0]) >= 1:
        found = found * 1.001
    if what == "writes" and RANK == 1 and model.training and int(steps[0]) == 3:
        model.last.bias.data = model.last.bias.data.clone()
    if what == "late" and RANK == 1 and model.training:
        seen.append(int(rows[0]))
        # The last step is the second one with the last rows; an optimizer may ask twice in each.
        if int(steps[0]) == 3 and seen.count(seen[-1]) == 4:
            model.last.bias.data = model.last.bias.data.clone()
    return found * float("nan") if what == "nan" and 60 in rows.tolist() else found


class Moments(quorate.Callback):
    """Scales and looks at what the optimizer keeps, which lies on all ranks."""

    def updated(self, report: Any) -> None:
        if report.global_step in (2, 5):
            for p in trainer.model.parameters():
                for name, value in made[-1].state.get(p, {}).items():
                    if name in ("exp_avg", "momentum_buffer") and value is not None:
                        value.mul_(0.5)
            if optimizer == "adafactor":
                next(iter(made[-1].state.values()))["step"].add_(1)
        if report.global_step == 6:
            made[-1].state.clear()


class Change(quorate.Callback):
    """Writes weights past autograd, freezes a layer, sets the learning rate."""

    def started(self, run: Any) -> None:
        self.model = run.model

    def updated(self, report: Any) -> None:
        if report.global_step == 3:
            self.model.last.weight.data = self.model.last.weight.data.clamp(-0.02, 0.02)
        if report.global_step == 4:
            self.model.first.requires_grad_(False)
        if report.global_step == 5:
            made[-1].param_groups[0]["lr"] = 3e-3


made: list[torch.optim.Optimizer] = []
seen: list[int] = []


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[:2], "lr": 0.05}, {"params": params[2:]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3)


def tensor_rates(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Learning rates in tensors, as compiled optimizers want them."""
    rates = [{"params": params[:2], "lr": torch.tensor(5e-3)}, {"params": params[2:]}]
    return torch.optim.Adam(rates, lr=torch.tensor(1e-2))


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around SGD: the gradient at one more point of each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        before = [p.data for p in held]
        for p in held:
            p.data = p.data + 0.05 * p.grad / norm
        with torch.enable_grad():
            closure()
        for p, values in zip(held, before, strict=True):
            p.data = values
        self.base.step()


OPTIMIZERS = {
    "sam": SAM,
    "wolfe": lambda params: torch.optim.LBFGS(
        params, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "sgd": two_groups,
    "tensors": tensor_rates,
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if folder:  # in the thread that exchanges, and updates
        Path(folder[0], f"threads-{RANK}").write_text(str(torch.get_num_threads()))
    made.append(OPTIMIZERS[optimizer](params))
    return made[-1]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(RANK if what == "data" else 0)
    rows = torch.arange(ROWS if what != "rows" or RANK == 0 else ROWS - 1)
    x = torch.randn(ROWS, 6, generator=generator)[rows]
    # In the order of the rows: a row's step follows from its number.
    return TensorDataset(
        x, torch.randint(0, 3, (len(rows),), generator=generator), rows, rows // BATCH
    )


if __name__ == "__main__":
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=quorate.Optimize(
            make,
            clip_norm=0.5,
            ema_decay=0.9,
            schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3),
            nonfinite="skip" if what == "nan" else "stop",
        ),
        batch_size=BATCH,
        shards=SHARDS if what != "shards" or RANK == 0 else SHARDS + 1,
        devices="cpu",
        run_dir=None
        if run_dir is None
        else quorate.RunDir(run_dir, save_every_steps=2, fresh="fresh" in rest),
    )
    if what == "around":  # the loop of the ranks is the first one, and not all there is
        assert trainer.evaluate(data())["loss"] > 0
        trainer.fit(data(), steps=5, shuffle=False)
    trainer.fit(
        data(),
        steps=STEPS,
        shuffle=False,
        validation=data(),
        callbacks={"change": [Change()], "one": [Change()], "moments": [Moments()]}.get(what, []),
    )
    print("digest", digest(trainer.model.state_dict().items()), flush=True)
