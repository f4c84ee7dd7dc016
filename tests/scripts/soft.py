"""Trains on a kind of device that lacks operators, as ``backend.py`` makes it.

    soft.py "cpu 1" "toy:0 2 soft log" "toy:0 1 soft view" ...

Each argument is a run: devices, workers, and options. After each comes a line of JSON: a hash of
the parameters and the loss, or what was raised with its notes. Then comes what the example of
placement prints, then a line with operators that gave another result, or other memory, than on the
CPU.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import backend

import quorate
from quorate import Trainer
from quorate.replica.computing import Computing
from quorate.replica.notes import Notes
from quorate.replica.placement.placement import Placement
from quorate.replica.streams import Stream
from quorate.training import notices

# As such, in place, with `out`, in a derivative alone, a view, one of two results, one made of
# others that writes. Convolutions and random numbers a backend would have to bring by itself.
LACKING = ["cumsum", "tanh", "tanh_", "sigmoid_backward", "erfinv", "view_as_real", "sort", "fill_"]


EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "placement.py"


class Cumulative(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.cumsum(x, 1))


class Inverse(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.tanh_()
        with torch.no_grad():
            offset = torch.empty(0, device=x.device)
            torch.erfinv(y * 0.5, out=offset)
        return y + offset + torch.rand_like(y)


class Turned(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.complex(x, x)).flatten(1)[:, : x.shape[1]]


class Unwritten(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("the script's own")


def model(*more: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv1d(1, 2, 3, padding=1),
        torch.nn.Flatten(),
        torch.nn.BatchNorm1d(12),
        Cumulative(),
        *more,
        torch.nn.Dropout(0.3),
        torch.nn.Linear(12, 8),
        Inverse(),
        torch.nn.Linear(8, 3),
    )


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def train(devices: str, workers: str, *options: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(48, 1, 6, generator=generator)
    labels = torch.randint(0, 3, (48,), generator=generator)
    dataset = torch.utils.data.TensorDataset(rows, labels)
    more = [kind() for kind in (Turned, Unwritten) if kind.__name__.lower() in options]
    trainer = Trainer(
        partial(model, *more),
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=24,
        shards=4,
        devices=devices,
        workers=quorate.Workers(int(workers), engine="towers"),
        compute=quorate.Compute(
            soft_placement="soft" in options,
            log_placement="log" in options,
            compile="compile" in options,
        ),
    )
    trainer.fit(dataset, epochs=2)
    parameters = torch.cat([p.detach().cpu().reshape(-1) for p in trainer.model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
    return {"parameters": digest, **trainer.evaluate(dataset)}


OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor twice": lambda x: torch.where(x > 0, x, x).tanh_().mul_(x),
    "in place, in a view": lambda x: (x[1:, ::2].tanh_(), x)[1],
    "out": lambda x: torch.erfinv(x, out=torch.empty(0, device=x.device)),
    "out that is a view": lambda x: (torch.erfinv(x[:, 0], out=x.t()[1]), x)[1],
    "two results": lambda x: torch.sort(x, 0),
    "results as outs": lambda x: torch.sort(
        x, out=(torch.empty(0, device=x.device), torch.empty(0, dtype=torch.int64, device=x.device))
    ),
    "made of others, and writes": lambda x: torch.full_like(x, 2.0) + x.fill_(3.0),
    "made of two, and writes": lambda x: torch.ops.quorate_test.made_of_two_(x),
    "draws": lambda x: torch.rand_like(x) + torch.randn(4, device=x.device),
    "a number": lambda x: torch.randperm(5, device=x.device).sum().item(),
    "draws without a generator": lambda x: torch.nn.functional.dropout(x, 0.5),
    "transposed": lambda x: torch.cumsum(x.t(), 0).stride(),
    "derivative": lambda x: torch.autograd.grad(
        torch.sigmoid(torch.cumsum(y := x.clone().requires_grad_(), 0)).sum(), y
    ),
}


def different() -> list[str]:
    """Names of operators that do not give on the device what the CPU gives."""
    library = torch.library.Library("quorate_test", "DEF")
    library.define("made_of_two_(Tensor(a!) x) -> ()")

    def made_of_two_(x: torch.Tensor) -> None:
        x.add_(1)  # which the device has, and is not to be done twice
        x.tanh_()

    library.impl("made_of_two_", made_of_two_, "CompositeExplicitAutograd")
    found = []
    for name, operator in OPERATORS.items():
        results = [computed(operator, torch.device(kind)) for kind in ("cpu", backend.NAME)]
        if results[0] != results[1]:
            found.append(f"{name}: {results}")
    return found


def computed(operator: Callable[[torch.Tensor], Any], device: torch.device) -> Any:
    """What an operator returns, and what is then in the tensor that it was given."""

    def work(_watched: bool) -> Any:
        stream.reseed(7)
        x = torch.linspace(-0.9, 0.9, 12).view(3, 4).clone().to(device)
        return operator(x), x

    placement = Placement([device], Computing(soft_placement=True), Notes(), until="")
    with Stream() as stream:
        for _ in range(2):  # what is lacking is known in the second
            found = placement.run(work, torch.nn.Identity(), stream, training=True)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu().tolist(), found)


def main() -> None:
    backend.register(LACKING)
    for words in sys.argv[1:]:
        notices.forget()  # each training says what it would say alone
        try:
            said = train(*words.split())
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            said = {"raised": f"{type(error).__name__}: {error}", "notes": notes}
        print(json.dumps(said), flush=True)
    sys.argv[1:] = ["--devices", "toy:0,cpu"]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    print(json.dumps(different()))


if __name__ == "__main__":
    main()
