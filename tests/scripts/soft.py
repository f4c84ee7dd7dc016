"""Trains on a kind of device without some operators, made by ``backend.py``.

    soft.py "cpu 1" "toy:0 2 soft log" "toy:0 1 soft turned" ...
    quorate run --devices toy:0 --workers 2 --soft-placement tests/scripts/soft.py

Each argument is a run: devices, workers, and options. After each comes a line of JSON: a hash of
the parameters and the loss, or the exception with its notes. The last line has operators with
another result, or other memory, than on the CPU.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import backend
from support.digests import digest

import quorate
from quorate.replica.computing import Computing
from quorate.replica.notes import Notes
from quorate.replica.placement.placement import Placement
from quorate.replica.streams import Stream
from quorate.training import notices

# As such, in place, with `out`, in a derivative alone, a view, one of two results, a composed
# operator with writes. Convolutions and random numbers would be a backend's own task.
LACKING = ["cumsum", "tanh", "tanh_", "sigmoid_backward", "erfinv", "view_as_real", "sort", "fill_"]


class Cumulative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.cumsum(x, 1))


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.tanh_()
        with torch.no_grad():
            offset = torch.empty(0, device=x.device)
            torch.erfinv(y * 0.5, out=offset)
        return y + offset + torch.rand_like(y)


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.complex(x, x)).flatten(1)[:, : x.shape[1]]


def model(*more: nn.Module) -> nn.Module:
    first = (nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.BatchNorm1d(12), Cumulative())
    last = (nn.Dropout(0.3), nn.Linear(12, 8), Inverse(), nn.Linear(8, 3))
    return nn.Sequential(*first, *more, *last)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def train(*options: str, **settings: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(48, 1, 6, generator=generator)
    labels = torch.randint(0, 3, (48,), generator=generator)
    dataset = torch.utils.data.TensorDataset(rows, labels)
    made = partial(model, *[Turned() for option in options if option == "turned"])
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    trainer = quorate.Trainer(made, loss, optimizer=sgd, batch_size=24, shards=4, **settings)
    trainer.fit(dataset, epochs=2)
    weights = digest((name, p.cpu()) for name, p in trainer.model.named_parameters())
    return {"parameters": weights, **trainer.evaluate(dataset)}


def train_on_towers(devices: str, workers: str, *options: str) -> dict[str, Any]:
    compute = quorate.Compute(soft_placement="soft" in options, log_placement="log" in options)
    towers = quorate.Workers(int(workers), engine="towers")
    return train(*options, devices=devices, workers=towers, compute=compute)


OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor twice": lambda x: torch.where(x > 0, x, x).tanh_().mul_(x),
    "in place, in a view": lambda x: (x[1:, ::2].tanh_(), x)[1],
    "out": lambda x: torch.erfinv(x, out=torch.empty(0, device=x.device)),
    "out that is a view": lambda x: (torch.erfinv(x[:, 0], out=x.t()[1]), x)[1],
    "two results": lambda x: torch.sort(x, 0),
    "made of others, and writes": lambda x: torch.full_like(x, 2.0) + x.fill_(3.0),
    "made of two, and writes": lambda x: torch.ops.quorate_test.made_of_two_(x),
    "draws": lambda x: torch.rand_like(x) + torch.randn(4, device=x.device),
    "draws without a generator": lambda x: torch.nn.functional.dropout(x, 0.5),
    "transposed": lambda x: torch.cumsum(x.t(), 0).stride(),
    "derivative": lambda x: torch.autograd.grad(
        torch.sigmoid(torch.cumsum(y := x.clone().requires_grad_(), 0)).sum(), y
    ),
}


def different() -> list[str]:
    """Return the names of operators with different results on the device and on the CPU."""
    library = torch.library.Library("quorate_test", "DEF")
    library.define("made_of_two_(Tensor(a!) x) -> ()")

    def made_of_two_(x: torch.Tensor) -> None:
        x.add_(1)  # an operator of the device, not to be done twice
        x.tanh_()

    library.impl("made_of_two_", made_of_two_, "CompositeExplicitAutograd")
    found = []
    for name, operator in OPERATORS.items():
        results = [computed(operator, torch.device(kind)) for kind in ("cpu", backend.NAME)]
        if results[0] != results[1]:
            found.append(f"{name}: {results}")
    return found


def computed(operator: Callable[[torch.Tensor], Any], device: torch.device) -> Any:
    """Return an operator's result, and the contents of its argument afterwards."""

    def work(_watched: bool) -> Any:
        stream.reseed(7)
        x = torch.linspace(-0.9, 0.9, 12).view(3, 4).clone().to(device)
        return operator(x), x

    placement = Placement([device], Computing(soft_placement=True), Notes(), until="")
    with Stream() as stream:
        for _ in range(2):  # missing operators are known in the second
            found = placement.run(work, nn.Identity(), stream, training=True)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu().tolist(), found)


backend.register(LACKING)
if __name__ == "__main__":
    for words in sys.argv[1:]:
        notices.forget()  # each training prints the same as alone
        try:
            said = train_on_towers(*words.split())
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            said = {"raised": f"{type(error).__name__}: {error}", "notes": notes}
        print(json.dumps(said), flush=True)
    print(json.dumps(different() if sys.argv[1:] else train()))
