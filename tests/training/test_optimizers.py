"""torch's optimizers do the same in a trainer as in a plain loop, on any workers and resumed."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest
from support.fits import Calls, fit, rows, sgd
from support.plain_loop import Make, assert_close, plain_loop
from support.runs import TOWER, command, digests, run
from torch import nn, optim
from torch.utils.data import TensorDataset

import quorate

BATCH, STEPS = 12, 15


def grouped(kind: type[optim.Optimizer], decay: bool = True, **options: Any) -> Make:
    """Return an optimizer of two groups: matrices, and all other parameters."""

    def make(params: list[nn.Parameter]) -> optim.Optimizer:
        others = {"weight_decay": 0.0} if decay else {}
        groups = [
            {"params": [p for p in params if p.ndim > 1]},
            {"params": [p for p in params if p.ndim < 2], "lr": 0.003, **others},
        ]
        return kind(groups, **options)  # type: ignore[arg-type]

    return make


OPTIMIZERS: dict[str, Make] = {
    "SGD momentum, decay": partial(optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.05),
    "SGD Nesterov": partial(optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": partial(optim.Adam, lr=0.01, weight_decay=0.05, eps=1e-4),
    "Adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, eps=1e-4),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-4),
    "RMSprop": partial(optim.RMSprop, lr=0.005, momentum=0.9, centered=True, eps=1e-3),
    "Adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.01, eps=1e-4),
    "NAdam": partial(optim.NAdam, lr=0.01, eps=1e-4),
    "Adamax": partial(optim.Adamax, lr=0.01, eps=1e-4),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.05, t0=5.0),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "AdamW groups": grouped(optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-4),
    "one group of two": lambda p: optim.SGD([p[0], p[3]], lr=0.1),
}


class Ways(nn.Module):
    """Has all traps for vectors of parameters.

    Each row goes to one expert; some shards, or some steps, have no row for an expert; a step takes
    one branch as a whole; a layer begins late, another is never used. Odd sizes, a parameter
    without dimensions, one in channels_last, a tied and a frozen one, and a part of another dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.first, self.tied = nn.Linear(3, 5), nn.Linear(3, 5)
        self.tied.weight = self.first.weight
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)
        self.late, self.never = nn.Linear(5, 1), nn.Linear(2, 2)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.image = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(5, 1)
        self.double()
        self.narrow = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, expert: torch.Tensor, step: int) -> torch.Tensor:
        h = torch.tanh(self.first(x) + self.tied(x) * self.scale)
        mixed = torch.zeros_like(h)
        for number, layer in enumerate(self.experts):
            of_it = (expert == number).nonzero()[:, 0]
            if len(of_it):
                mixed = mixed.index_add(0, of_it, layer(h[of_it]))
        h = h + mixed + (self.left if step % 3 else self.right)(self.frozen(h))
        out = self.last(h) + self.image(x[:, :, None, None].expand(-1, -1, 2, 2)).sum((1, 2))
        return out + self.late(h) if step >= 4 and step % 2 else out


def ways() -> nn.Module:
    torch.manual_seed(0)
    return Ways()


def routed() -> TensorDataset:
    """Return rows of all steps: x, the row's expert (the last is rare), the step, y."""
    generator, count = torch.Generator().manual_seed(3), STEPS * BATCH
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    often = torch.tensor([5.0, 3.0, 0.3, 0.1])
    expert = torch.multinomial(often, count, True, generator=generator)
    step = torch.arange(STEPS).repeat_interleave(BATCH)
    return TensorDataset(x, expert, step, x.sin().sum(1, keepdim=True))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, expert, step, y = batch
    wide = (model(x, expert, int(step[0])) - y).square().mean()
    narrow = model.narrow(x.float()).square().mean()  # type: ignore[operator]
    return wide + narrow


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_that_of_a_plain_loop_on_any_workers_and_resumed(
    name: str, tmp_path: Path
) -> None:
    make, plain, data = OPTIMIZERS[name], ways(), routed()
    plain_loop(plain, make, loss, data, steps=STEPS)
    options: dict[str, Any] = {"optimizer": make, "shuffle": False, "engine": "towers"}
    through = fit(ways(), loss, data, steps=STEPS, workers=1, **options)
    assert_close(through.model, plain, 1e-12)
    for workers, steps in ((2, 1), (3, 5), (2, STEPS)):  # 1: without a state of most parameters
        options |= {"run_dir": tmp_path, "summary_every_s": None}
        resumed = fit(ways(), loss, data, steps=steps, workers=workers, **options)
    found = resumed.model.state_dict()
    assert digest(found.items()) == digest(through.model.state_dict().items())
    before = ways().state_dict()
    assert all(torch.equal(found[key], before[key]) for key in before if "never" in key)


# --- to the bit -----------------------------------------------------------------------------------


class Own(optim.Adam):
    """A subclass is torch's own affair."""


def change(step: int, groups: list[dict[str, Any]]) -> None:
    """Change the settings like a user's own schedule; a rate as a tensor too."""
    if step == 3:
        groups[0]["lr"] = 0.5
    elif step == 5:
        groups[0]["lr"] = torch.tensor(0.01)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (partial(optim.Adam, weight_decay=0.1, maximize=True, fused=True), torch.float32),
        (partial(optim.Adam, amsgrad=True, fused=True), torch.float64),
        (partial(Own, lr=0.01, fused=True), torch.float32),
        (grouped(optim.AdamW, lr=0.01, weight_decay=0.1, fused=True), torch.float32),
    ],
    ids=["maximize", "amsgrad", "subclass", "groups"],
)
def test_one_shard_makes_the_steps_of_adam_to_the_bit(make: Make, dtype: torch.dtype) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16)).to(dtype)

    def squared(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0].to(dtype)).square().mean()

    plain, data = net(), rows(64, 64)
    torchs: list[optim.Optimizer] = []

    def made(params: list[nn.Parameter]) -> optim.Optimizer:
        torchs.append(make(params))
        return torchs[-1]

    def updated(step: int, _loss: float) -> None:
        change(step, torchs[-1].param_groups)

    plain_loop(plain, made, squared, data, steps=8, batch_size=16, updated=updated)

    changes = Calls(lambda run, report: change(report.global_step, run.param_groups))
    ours = fit(
        net(), squared, data, optimizer=make, batch_size=16, shards=1, workers=1, steps=8,
        shuffle=False, callbacks=[changes],
    )  # fmt: skip
    assert digest(ours.model.state_dict().items()) == digest(plain.state_dict().items())


ELEMENTWISE = [
    partial(optim.RMSprop, momentum=0.9, centered=True),
    *(
        pytest.param(make, marks=pytest.mark.slow)
        for make in (
            partial(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
            partial(optim.Adam, amsgrad=True, weight_decay=0.01),
            optim.ASGD,
        )
    ),
]
MANY = (1 << 24) + 98  # elements: an update of so many takes all cores


class Long(nn.Module):
    """Two odd lengths: each thread's stretch ends elsewhere than a vector register does."""

    def __init__(self, size: int = MANY, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(size, generator=generator).to(dtype)
        self.many, self.few = nn.Parameter(values), nn.Parameter(torch.ones(331, dtype=dtype))


def of_long(model: Any, batch: Any) -> torch.Tensor:
    """Return a loss with a different gradient for each element."""
    by = batch[0].mean().to(model.many.dtype)
    return (model.many * (model.many + by)).sum() * 1e-3 + (model.few * by).sum()


@pytest.mark.parametrize("make", ELEMENTWISE, ids=lambda m: getattr(m, "func", m).__name__)
def test_an_update_of_many_elements_on_all_cores_has_the_bits_of_one_core(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps in blocks, the mean and the norm of the gradient, and the averaged weights."""
    found, data = set(), rows(8, 1)
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: {*range(cores)})
        made = quorate.Optimize(partial(make, lr=0.01), clip_norm=1.0, ema_decay=0.9)
        ours = fit(
            Long, of_long, data, optimizer=made, batch_size=4, shards=2, workers=1, epochs=1,
            shuffle=False, spot_check_every=0,
        )  # fmt: skip
        assert ours.averaged_model is not None
        found.add(
            digest([*ours.model.state_dict().items(), *ours.averaged_model.named_parameters()])
        )
    assert len(found) == 1
    plain = Long()
    plain_loop(plain, partial(make, lr=0.01), of_long, data, steps=2, batch_size=4, clip_norm=1.0)
    away = (ours.model.many - plain.many).abs() > 1e-4
    assert away.float().mean() < 1e-3  # where a gradient is almost zero a step may go either way


SPAN = 1 << 17  # elements of a block


@pytest.mark.parametrize(
    ("dtype", "beside"), [(torch.float32, -70), (torch.bfloat16, 1), (torch.complex64, 1)]
)
def test_a_mean_in_blocks_is_that_of_whole_vectors(dtype: torch.dtype, beside: int) -> None:
    """Use SGD with a rate of 1, and weights without division: gradients are added by a tree."""
    size, weights = 2 * SPAN + beside, [2, 3, 3, 3]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(size, generator=generator).to(dtype) for _ in weights]

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.Parameter(torch.zeros(size, dtype=dtype))

    def given(model: Any, batch: Any) -> torch.Tensor:
        number = int(batch[0][0, 0])
        value = (model.many * gradients[number]).sum()
        return value.real.float() if dtype.is_complex else value

    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(weights))
    ours = fit(
        One, given, TensorDataset(numbers[:, None]), optimizer=partial(optim.SGD, lr=1.0),
        batch_size=11, shards=4, workers=1, steps=1, shuffle=False, spot_check_every=0,
    )  # fmt: skip
    terms = [g.conj().resolve_conj() * w for g, w in zip(gradients, weights, strict=True)]
    expected = -((terms[0] + terms[1]) + (terms[2] + terms[3])) / 11
    assert torch.equal(ours.model.many.detach(), expected)


@pytest.mark.parametrize("odd", [float("nan"), -float("inf")])
def test_one_element_that_is_not_finite_is_seen_wherever_it_is(odd: float) -> None:
    places = [0, SPAN - 1, SPAN, 2 * SPAN + 5, 3 * SPAN + 4]
    where = torch.tensor([[place] for place in places])

    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, many: torch.Tensor, place: int) -> torch.Tensor:
            ctx.place = place
            return many.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            spoilt = gradient.clone()
            spoilt[ctx.place] = odd
            return spoilt, None

    def spoilt(model: Any, batch: Any) -> torch.Tensor:
        return Spoils.apply(model.many, int(batch[0][0, 0])).sum() * 1e-3 + model.few.sum()

    ours = quorate.Trainer(
        lambda: Long(3 * SPAN + 5), spoilt, optimizer=quorate.Optimize(sgd, nonfinite="skip"),
        batch_size=1, shards=1, devices="cpu", workers=1,
    )  # fmt: skip
    before = Long(3 * SPAN + 5).state_dict()
    reports = [*ours.updates(TensorDataset(where), shuffle=False)]
    assert [report.not_finite for report in reports] == [1, 2, 3, 4, 5]
    assert all(torch.equal(v, before[k]) for k, v in ours.model.state_dict().items())


# --- updates in parts, where a replica is in stages of processes ----------------------------------

IN_PARTS = """
import os, signal, sys, torch, quorate
from functools import partial
from multiprocessing import active_children
from torch import nn, optim
from torch.utils.data import TensorDataset

name, kills = sys.argv[1], int(sys.argv[2])
makes = {
    "groups": lambda ps: optim.AdamW([{"params": ps[:1]}, {"params": ps[1:], "lr": 0.05}], lr=0.01),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
}

def parts():
    return [p for p in active_children() if p.name.startswith("quorate-part")]

class Changes(quorate.Callback):
    def started(self, trainer):
        self.trainer = trainer
    def updated(self, report):
        self.trainer.param_groups[0]["lr"] = 0.01 * report.global_step
        alive = parts()
        if kills and alive:
            killed = alive[report.global_step % len(alive)]
            os.kill(killed.pid, signal.SIGKILL)
            killed.join()
        print("parts:", len(alive))

def net():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 1))

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
trainer = quorate.Trainer(net, loss, optimizer=makes[name], batch_size=12, shards=4)
trainer.fit(TensorDataset(x, x.sum(1, keepdim=True)), steps=6, callbacks=[Changes()])
"""


@pytest.mark.parametrize(("name", "parts"), [("groups", 2), ("Adafactor", 0)])
def test_updates_in_parts_have_the_bits_of_one_process_whoever_is_killed(
    name: str, parts: int, tmp_path: Path
) -> None:
    """Adafactor looks at shapes: then one process makes all updates, and says so."""
    script = tmp_path / "script.py"
    script.write_text(IN_PARTS)
    ways = {"tower": TOWER, "stages": ("--devices", "cpu+cpu", "--workers", "1")}
    for way, options in ways.items():
        where = ("--run-dir", str(tmp_path / way))
        ended = run(command(script, name, str(int(name == "groups")), options=(*options, *where)))
        assert ended.code == 0, ended.said
    assert ended.out.count(f"parts: {parts}") == 6
    assert ("one process makes all updates" in ended.out) == (not parts)
    assert digests(tmp_path / "stages") == digests(tmp_path / "tower")
