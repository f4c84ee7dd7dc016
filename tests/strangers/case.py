"""A case: a training as a stranger would write it, and its expected outcome."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quorate

STEPS, BATCH, SHARDS = 8, 24, 6

# The possible outcomes of a case. None is silent.
SAME = "same"  # the same bits everywhere, and no doubt
SAID = "said"  # a doubt is reported, with a name
REFUSED = "refused"  # a line, exit code 2; on other engines perhaps the same bits

SGD = partial(torch.optim.SGD, lr=0.05)
Loss = Callable[..., Any]
Module = TypeVar("Module", bound=type[nn.Module])
Function = TypeVar("Function", bound=Loss)


# --- data and models, seeded ----------------------------------------------------------------------


def vectors(rows: int = 96, classes: int = 3) -> TensorDataset:
    """Rows of 8 numbers and a class."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=g)
    y = (x @ torch.randn(8, classes, generator=g)).argmax(1)
    return TensorDataset(x, y)


def tokens(rows: int = 96, length: int = 10, words: int = 20) -> TensorDataset:
    """Rows of token numbers and a class."""
    g = torch.Generator().manual_seed(2)
    x = torch.randint(1, words, (rows, length), generator=g)
    return TensorDataset(x, x.sum(1) % 3)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Classes from the first of the batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp(hidden: int = 16) -> nn.Sequential:
    """A small network over ``vectors``."""
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))


class Net(nn.Module):
    """``mlp`` in a module, the base of cases."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# --- cases ----------------------------------------------------------------------------------------


@dataclass
class Case:
    """A training.

    Args:
        outcome: any of these outcomes is right.
        names: the name required in a doubt or a refusal.
        says: the words required in a notice on three towers.
        after: the actions of a plain loop after its update number n, beside callbacks' effects:
            ``after(model, optimizer, n)``.
        plain: whether the right values come from a plain loop over the same shards.
    """

    outcome: str | tuple[str, ...] = SAME
    names: str = ""
    says: str = ""
    model: nn.Module = field(default_factory=mlp)
    loss: Loss = cross_entropy
    data: Any = field(default_factory=vectors)
    optimizer: Any = SGD
    callbacks: Sequence[Any] = ()
    after: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    plain: bool = True
    settings: dict[str, Any] = field(default_factory=dict)  # further ones of Trainer
    optimize: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # of the command

    def fit(self, steps: int = STEPS, callbacks: Sequence[Any] = (), **settings: Any) -> nn.Module:
        """Train the model."""
        optimize = quorate.Optimize(self.optimizer, **self.optimize)
        more: dict[str, Any] = {"batch_size": BATCH, "shards": SHARDS, "seed": 0}
        more |= self.settings | settings
        trainer = quorate.Trainer(self.model, self.loss, optimizer=optimize, **more)
        trainer.fit(self.data, steps=steps, shuffle=False, callbacks=[*self.callbacks, *callbacks])
        return trainer.model


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case], name: str = "") -> Callable[[], Case]:
    """List a case under the name of the function."""
    name = name or make.__name__
    assert name not in CASES, name
    CASES[name] = make
    return make


def module(
    name: str, outcome: str | tuple[str, ...] = SAME, names: str = "", **more: Any
) -> Callable[[Module], Module]:
    """List a class as the model of a case; ``data`` is a function."""
    data = more.pop("data", vectors)

    def listed(kind: Module) -> Module:
        case(lambda: Case(outcome, names, model=kind(), data=data(), **more), name)
        return kind

    return listed


def forward(
    outcome: str | tuple[str, ...] = SAME,
    names: str = "",
    state: Callable[[], dict[str, Any]] = dict,
    **more: Any,
) -> Callable[[Loss], type[nn.Module]]:
    """List a ``Net`` with another forward pass, ``function(self, x)``, as a case of the same name.

    Args:
        state: returns attributes of a new model; a tensor among them is a buffer.
    """

    def listed(function: Loss) -> type[nn.Module]:
        def begin(self: Any) -> None:
            Net.__init__(self)
            for name, value in state().items():
                is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
                (self.register_buffer if is_buffer else self.__setattr__)(name, value)

        body = {"__init__": begin, "forward": function, "__module__": function.__module__}
        kind = type(function.__name__, (Net,), body)
        return module(function.__name__, outcome, names, **more)(kind)

    return listed


def loss(
    outcome: str | tuple[str, ...] = SAME, names: str = "", model: Any = mlp, **more: Any
) -> Callable[[Function], Function]:
    """List a function as a loss: a case of the same name; ``model`` and ``data`` are functions."""
    data = more.pop("data", vectors)

    def listed(function: Function) -> Function:
        def make() -> Case:
            return Case(outcome, names, model=model(), loss=function, data=data(), **more)

        case(make, function.__name__)
        return function

    return listed


class After(quorate.Callback):
    """Calls a function after each update: ``change(model, None, n)``."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def started(self, trainer: Any) -> None:
        self.trainer = trainer

    def updated(self, report: Any) -> None:
        self.change(self.trainer.model, None, report.global_step)


def between(
    outcome: str | tuple[str, ...] = SAME, names: str = "", model: Any = mlp, **more: Any
) -> Callable[[Function], Function]:
    """List a callback's effect, ``change(model, None, n)``, as a case of the same name."""
    more.setdefault("optimizer", partial(torch.optim.SGD, lr=0.1, momentum=0.9))

    def listed(change: Function) -> Function:
        def make() -> Case:
            then: dict[str, Any] = {"callbacks": [After(change)], "after": change}
            return Case(outcome, names, model=model(), **then, **more)

        case(make, change.__name__)
        return change

    return listed


def pairs(one: nn.Module, other: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Return the parameters of two modules of the same shape."""
    return zip(one.parameters(), other.parameters(), strict=True)
