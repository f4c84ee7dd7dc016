"""A training for ranks of a collective: with everything that influences bits, and mischief.

    quorate run --engine collective --workers 3 tests/scripts/ranks.py optimizer=sgd then=change
    torchrun --nproc-per-node 3 -m quorate run tests/scripts/ranks.py what=KILL at=forward,1,3

Words: ``optimizer`` of OPTIMIZERS; ``then``: callbacks of CALLBACKS; ``steps``; ``pause``: the
least seconds of each shard; ``saves``: all ranks write checkpoints, however small;
``loss=gather``: InfoNCE over all rows of a batch, with the steps of the first epoch;
``loss=terms``: a term over some rows beside a term over all rows;
``deep``: another net, with gradients sent while backward makes the next; ``kept``: a folder
for predictions.

``what`` happens once, ``at`` a phase of a rank in a step: a signal (KILL, STOP, TERM), hang, exit,
raise, hungry; or full, at a call for a file of the second save ("pwrite,1,2": rank 1, the 2nd
call). Or a rank differs: model, data, rows, shards, writes, other. Also without a
rank: nan, inf, around, one, more. ``folder`` gets the pids of ranks, and the time.
"""

import errno
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, Subset

import quorate

WORDS = {"optimizer": "adam", "then": "", "steps": "8", "pause": "0", "what": "", "at": ",,"}
WORDS |= {"folder": "", "size": "3", "saves": "", "loss": "", "deep": "", "kept": ""}
WORDS |= dict(word.split("=", 1) for word in sys.argv[1:])
WHAT, (PHASE, TARGET, NUMBER) = WORDS["what"], WORDS["at"].split(",")
FOLDER = Path(WORDS["folder"]) if WORDS["folder"] else None
ROWS, BATCH, SHARDS, STEPS = 96, 24, 4, int(WORDS["steps"])


def own_rank() -> int:
    """Return torchrun's rank of this process, or its place among the forks of rank 0."""
    if "RANK" in os.environ or not quorate.is_worker() or FOLDER is None:
        return int(os.environ.get("RANK", quorate.is_worker()))
    (FOLDER / f"forked-{os.getpid()}").touch()
    while len(forked := sorted(FOLDER.glob("forked-*"))) < int(WORDS["size"]) - 1:
        time.sleep(0.01)
    return 1 + [int(path.name.partition("-")[2]) for path in forked].index(os.getpid())


RANK = own_rank()
IS_TARGET = str(RANK) == TARGET
seen: list[int] = []
updates: list[int] = []
hoard: list[bytes] = []
made: list[torch.optim.Optimizer] = []


def here(phase: str, number: int = 0, *, by_first: bool = False) -> None:
    """Make the mischief happen, once, if this is its place.

    Args:
        number: the step, or the number of a call.
        by_first: whether rank 0 alone comes here, on behalf of the target rank.
    """
    if FOLDER is None or phase != PHASE or number < int(NUMBER) or not (IS_TARGET or by_first):
        return
    try:
        (FOLDER / "happened").touch(exist_ok=False)
    except FileExistsError:
        if WHAT not in ("exit", "full", "raise"):  # tried once more
            return
    (FOLDER / "happened").write_text(str(time.time()))
    match WHAT:
        case "hang":
            time.sleep(1e6)
        case "exit":
            sys.exit(0)
        case "raise":
            raise ValueError("mine")
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "hungry":
            hoard.extend(b"x" * (16 << 20) for _ in range(1000))
        case name:
            pid = int((FOLDER / TARGET).read_text()) if by_first else os.getpid()
            os.kill(pid, getattr(signal, f"SIG{name}"))


class Rows(Dataset[tuple[torch.Tensor, int, int]]):
    """Rows with their number: a row's step follows from the number, in the order of rows."""

    def __len__(self) -> int:
        return ROWS - (WHAT == "rows" and RANK == 1)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int, int]:
        here("fetching", row // BATCH)
        seed = 1000 * (WHAT == "data") * RANK + row
        return torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(seed)), row % 3, row


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, step: int) -> torch.Tensor:
        context.step = step
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        here("backward", context.step)
        if PHASE == "exchange" and IS_TARGET:  # while the other ranks compute their shards
            threading.Timer(0.2, here, ["exchange", context.step]).start()
        return gradient, None


class Net(nn.Module):
    """Parameters of two dtypes, by rows and not, larger than a slice and tiny, an unused parameter.

    BatchNorm, dropout, optional branches of a shard, a table with renormalised rows.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 300, 5)
        weight = self.first.weight.data
        self.first.weight.data = weight.to(memory_format=torch.channels_last)
        if WORDS["optimizer"] == "wolfe":  # needs views of gradients
            self.first.requires_grad_(False)
        self.norm = nn.BatchNorm1d(300)
        self.left, self.right = nn.Linear(300, 400), nn.Linear(300, 400)
        self.table = nn.Embedding(8, 400, max_norm=None if WHAT == "one" else 0.5)
        self.unused = nn.Linear(400, 300)
        self.precise = nn.Linear(400, 200).double()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.log_temperature = nn.Parameter(torch.tensor(-0.5))  # only for the loss of a batch
        self.last = nn.Linear(200, 4 if WHAT == "model" and RANK == 1 else 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm(self.first(x).flatten(1)))
        branch = self.left if float(x[0, 0, 0, 0]) > 0 else self.right
        inner = branch(inner) + self.table((x[:, 1, 0, 0] > 0).long())
        inner = F.dropout(F.relu(inner), 0.3, self.training) * self.scale
        return self.last(self.precise(inner.double()).float())


class Doubled(torch.autograd.Function):
    """Return the same value; double the present gradient of another parameter."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.weight = weight
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.weight.grad is not None:
            context.weight.grad.mul_(2)
        return gradient, None


class Deep(nn.Module):
    """Layers of more than a slice each; some are frozen, unused, or used twice.

    doubled: a gradient changes after its creation. checkpoints: backward passes within the backward
    pass. teacher: forward moves frozen weights, and a buffer comes late.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(75, 300)
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))
        self.frozen = nn.Linear(300, 300).requires_grad_(False)
        self.unused = nn.Linear(300, 300)
        self.register_buffer("scale", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x.flatten(1)).relu()
        if WORDS["deep"] == "doubled":
            inner = Doubled.apply(inner, self.layers[2].weight)
        elif WORDS["deep"] == "teacher":
            self.frozen.weight.data.mul_(0.9).add_(self.layers[0].weight.data, alpha=0.1)
            if self.scale is None:
                self.scale = torch.full((300,), 0.5)
            inner = inner * self.scale
        for layer in self.layers:
            for reentrant in (True, False):
                if WORDS["deep"] == "checkpoints":
                    inner = checkpoint(layer, inner, use_reentrant=reentrant).relu()
                else:
                    inner = layer(inner).relu()
        return self.frozen(inner)


def loss(model: Any, batch: Any, at: Any) -> Any:
    x, labels, rows = batch
    if not model.training:
        here("evaluation", at.step, by_first=True)
        return F.cross_entropy(model(x), labels)
    here("forward", at.step)
    time.sleep(float(WORDS["pause"]))
    if PHASE == "exchange" and at.step == int(NUMBER) and not IS_TARGET:
        time.sleep(0.5)
    if IS_TARGET or WHAT == "nan":
        return strange(model, x, labels, rows, at.step)
    if WORDS["loss"] == "terms":
        logits, some = Backward.apply(model(x), at.step), labels == 0
        few = {"loss": F.cross_entropy(logits[some], labels[some]), "weight": some.sum()}
        return {"loss": {"few": few, "size": logits.square().mean()}}
    return F.cross_entropy(Backward.apply(model(x), at.step), labels)


def represent(model: Any, batch: Any) -> tuple[torch.Tensor, ...]:
    x, _, rows = batch
    step = int(rows[0]) // BATCH
    if model.training:
        here("forward", step)
    views = (F.normalize(model(view), dim=1) for view in (x, x + 0.1 * torch.randn_like(x)))
    return tuple(Backward.apply(view, step) for view in views)


def contrast(model: Any, views: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    one, other = views
    logits = one @ other.T / model.log_temperature.exp()
    own = torch.arange(len(one))
    factor = math.inf if WHAT == "inf" and float(one[0, 0]) > 0 and model.training else 1.0
    found = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2 * factor
    if WHAT == "contrast" and model.training and made[-1].param_groups[0]["lr"] < 1e-2:
        raise ValueError("mine")  # once the schedule has gone down
    return {"loss": found, "accuracy": (logits.argmax(1) == own).float().mean()}


def strange(model: Any, x: Any, labels: Any, rows: Any, step: int) -> torch.Tensor:
    """Return the loss of a rank with a difference, or of a step without a loss."""
    if WHAT == "again":
        seen.append(int(rows[0]))
    if WHAT == "again" and step == 2 and seen.count(seen[-1]) == 2:
        raise ValueError("mine")  # in the gradient at parameters moved by the optimizer
    if WHAT == "writes" and step == 3:
        model.last.bias.data = model.last.bias.data.clone()
    found = F.cross_entropy(Backward.apply(model(x), step), labels)
    if WHAT == "other" and step >= 1:
        found = found * 1.001
    return found * float("nan") if WHAT == "nan" and 60 in rows.tolist() else found


class Adam(torch.optim.Adam):
    """Adam that may be killed in a step."""

    def step(self, closure: Any = None) -> Any:
        updates.append(len(updates))
        here("update", updates[-1])
        return super().step(closure)


def groups(params: list[nn.Parameter], lr: Any) -> list[dict[str, Any]]:
    return [{"params": params[:3], "lr": lr}, {"params": params[3:]}]


OPTIMIZERS = {
    "wolfe": lambda params: torch.optim.LBFGS(
        params, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"
    ),
    "adam": lambda params: (Adam if PHASE == "update" else torch.optim.Adam)(
        params, lr=1e-2, amsgrad=True
    ),
    "sgd": lambda params: torch.optim.SGD(
        groups(params, 0.05), lr=0.1, momentum=0.9, weight_decay=1e-3
    ),
    # As compiled optimizers want them.
    "tensors": lambda params: torch.optim.Adam(
        groups(params, torch.tensor(5e-3)), lr=torch.tensor(1e-2)
    ),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    made.append(OPTIMIZERS[WORDS["optimizer"]](params))
    return made[-1]


OPTIMIZERS["several"] = OPTIMIZERS["adam"]
SEVERAL: Any = [
    ("precise", lambda named_parameters: torch.optim.SGD(named_parameters, 0.1, 0.9), None, 0.2),
    ("left.weight", OPTIMIZERS["adafactor"]),
    ("*", make, None, 0.3),
]


class Tells(quorate.Callback):
    """Prints each step and the crew; saves at once, so a rank can fail meanwhile."""

    def started(self, run: Any) -> None:
        self.run = run

    def updated(self, report: quorate.Report) -> None:
        print(f"made step {report.global_step} on {len(self.run.workers)}", flush=True)
        if report.global_step == 3 and PHASE == "saving":
            self.run.save()


class Change(quorate.Callback):
    """Writes weights past autograd, freezes a layer, sets the learning rate."""

    def started(self, run: Any) -> None:
        self.model: Any = run.model

    def updated(self, report: quorate.Report) -> None:
        if report.global_step == 3:
            self.model.last.weight.data = self.model.last.weight.data.clamp(-0.02, 0.02)
        if report.global_step == 4:
            self.model.left.requires_grad_(False)
        if report.global_step == 5:
            made[-1].param_groups[0]["lr"] = 3e-3


class Halve(quorate.Callback):
    """Scales the optimizer's state, spread over all ranks or servers."""

    def updated(self, report: quorate.Report) -> None:
        if report.global_step in (2, 5):
            for p in trainer.model.parameters():
                for name in ("exp_avg", "momentum_buffer"):
                    if (value := made[-1].state.get(p, {}).get(name)) is not None:
                        value.mul_(0.5)


class Moments(Halve):
    """Changes state of a single rank, and clears the state."""

    def updated(self, report: quorate.Report) -> None:
        super().updated(report)
        if report.global_step == 2 and WORDS["optimizer"] == "adafactor":
            next(iter(made[-1].state.values()))["step"].add_(1)
        if report.global_step == 6:
            made[-1].state.clear()


def outputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    x, _, rows = batch
    here("predicting", int(rows[0]))
    y = model(x)
    return {
        "y": y,
        "long": x.flatten(1).repeat(1, 160),
        "rows": [row[: i % 3 + 1] for i, row in enumerate(x)],
        "kinds": (y.bfloat16(), x > 0, x[:, :0], torch.complex(x, x), x.mT.contiguous().mT),
        "odd": [{"n": i % 2, "x": row.to(torch.uint8), "t": "text"} for i, row in enumerate(x)],
    }


def in_files(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {k: value for k, value in outputs(model, batch).items() if k in ("long", "rows")}


def predict(name: str) -> Any:
    """Keep predictions of some rows as a file, and return them."""
    predicted = trainer.predict(Subset(Rows(), range(70)), outputs)
    torch.save(predicted, Path(WORDS["kept"], f"{name}.pt"))
    return predicted


class Predicts(quorate.Callback):
    """Predicts by functions with and without a name, and to files."""

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        predicted, some = predict(f"step-{global_step}"), Subset(Rows(), range(70))
        assert torch.equal(trainer.predict(some, lambda m, batch: m(batch[0])), predicted["y"])
        folder = trainer.predict(some, in_files, to=Path(WORDS["kept"], f"step-{global_step}"))
        assert np.array_equal(np.load(folder / "long.npy"), predicted["long"].numpy())


CALLBACKS = {"tells": Tells, "change": Change, "halve": Halve, "moments": Moments}
CALLBACKS |= {"predicts": Predicts}
drafts: list[str] = []  # folders of written checkpoints
calls: dict[tuple[str, str], int] = {}


def hook(name: str) -> None:
    """Have calls of the system for files of checkpoints be moments of their own."""
    inner = getattr(os, name)

    def hooked(descriptor: int, *arguments: Any) -> Any:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.parent.parent.name == "checkpoints":
            draft = path.parent.name
            if draft not in drafts and path.suffix == ".safetensors":
                drafts.append(draft)
            calls[draft, name] = calls.get((draft, name), 0) + 1
            if drafts[1:2] == [draft]:
                here(name, calls[draft, name])
                if RANK == 0:
                    here("saving", int(NUMBER), by_first=True)
        return inner(descriptor, *arguments)

    setattr(os, name, hooked)


if __name__ == "__main__":
    if FOLDER is not None:
        (FOLDER / str(RANK)).write_text(str(os.getpid()))
    if WORDS["saves"]:
        from quorate.training.owners import slice_files

        slice_files.GATHERED_BYTES = 0  # else 64 MiB
    if PHASE in ("pwrite", "fsync", "saving"):
        hook("pwrite" if PHASE == "pwrite" else "fsync")
    here("start")
    trainer = quorate.Trainer(
        Deep if WORDS["deep"] else Net,
        quorate.Gather(represent, contrast) if WORDS["loss"] == "gather" else loss,
        optimizer=quorate.Optimize(
            SEVERAL if WORDS["optimizer"] == "several" else make,
            clip_norm=0.5,
            ema_decay=0.9,
            schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3),
            nonfinite="skip" if WHAT in ("nan", "inf") else "stop",
        ),
        batch_size=BATCH,
        shards=SHARDS + (WHAT == "shards" and RANK == 1),
        devices="cpu",
    )
    if WHAT == "around":  # the loop of the ranks is the first loop, and more follows
        assert trainer.evaluate(Rows())["loss"] > 0
        trainer.fit(Rows(), steps=5, shuffle=False)
    if WORDS["kept"]:
        predict("before")
    trainer.fit(
        Rows(),
        steps=STEPS,
        shuffle=False,
        validation=quorate.Validation(Rows(), every_steps=max(2, STEPS // 40)),
        callbacks=[CALLBACKS[name]() for name in WORDS["then"].split(",") if name],
    )
    if WORDS["kept"]:
        predict("then")
    if WHAT == "more":  # of a finished run: the ranks have ended, and rank 0 has all state
        trainer.save()
        trainer.fit(Rows(), steps=STEPS + 2, shuffle=False)
