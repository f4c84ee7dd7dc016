"""A backward pass in two parts: the bits of one pass, and what is left for the second part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from quorate.replica.kernels import ONEDNN, products
from quorate.replica.pipeline.buffers import are_same
from quorate.replica.pipeline.two_parts import Root, derive, derive_first
from quorate.replica.streams import Stream


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factor)
        return 2 * x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, factor = ctx.saved_tensors
        return 2 * gradients[0] * factor, (2 * gradients[0] * x).sum()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = Doubles.apply(x, self.factor)  # type: ignore[no-untyped-call]
        return scaled


class Twice(nn.Module):
    """A layer that is called twice; its sum of gradients has an order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        return x + self.layer(self.other(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.below, self.rnn, self.head = nn.Linear(8, 8), kind(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read: torch.Tensor = self.head(self.rnn(self.below(x))[0])
        return read


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant
        self.computed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(x: torch.Tensor) -> torch.Tensor:
            self.computed += 1
            return torch.dropout(self.part(x).sin(), 0.3, train=True)

        kept = checkpoint(part, self.first(x), use_reentrant=self.reentrant)
        last: torch.Tensor = self.last(kept)
        return last


class Hooked(nn.Module):
    """What a hook makes of a gradient goes on, and is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.register_full_backward_hook(lambda _, given, __: (given[0] * 3,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x.register_hook(lambda gradient: gradient * 1.5)
        last: torch.Tensor = self.last(x)
        last.register_hook(lambda gradient: gradient + 0.25)
        return last


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.scale = nn.Embedding(5, 8), nn.Parameter(torch.rand(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        placed: torch.Tensor = self.frozen(x + self.places(torch.arange(5))) * self.scale
        return placed


def convolutions() -> nn.Module:
    layers = nn.Conv1d(5, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*layers, nn.Conv1d(6, 6, 3, padding=1, bias=False), nn.GroupNorm(2, 6))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


# How many parameters are put off, of how many.
CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), 4, 4),
    "convolutions": (convolutions, 7, 7),
    "attention": (attention, 12, 12),
    "used twice": (Twice, 2, 4),
    "function": (lambda: nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)), 4, 5),
    "lstm": (lambda: Recurrent(nn.LSTM), 4, 8),
    "gru": (lambda: Recurrent(nn.GRU), 6, 8),
    "checkpoint": (lambda: Checkpointed(reentrant=False), 4, 6),
    "reentrant checkpoint": (lambda: Checkpointed(reentrant=True), 0, 6),
    "hooks": (Hooked, 4, 4),
    "places": (Places, 2, 2),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), 3, 3),
}


def gradients_of(
    model: nn.Module, leaves: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Take gradients: of leaves, and of parameters."""
    found = [leaf.grad for leaf in leaves], [p.grad for p in model.parameters()]
    for tensor in (*leaves, *model.parameters()):
        tensor.grad = None
    return found


def passes(model: nn.Module, values: torch.Tensor) -> tuple[torch.Tensor, Root]:
    """A forward pass, as of a stage: its leaf, and where its backward pass begins."""
    torch.manual_seed(5)
    leaf = values.clone().requires_grad_()
    output = model(leaf * 1.0)
    return leaf, Root(output, torch.linspace(-1, 1, output.numel()).view_as(output))


def compared(model: nn.Module, values: torch.Tensor) -> int:
    """Compute in one part and in two; return how many parameters the second part had."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    leaf, root = passes(model, values)
    derive([root])
    of_leaf, whole = gradients_of(model, [leaf])
    leaf, root = passes(model, values)
    second = derive_first([root], parameters)
    of_leaf_first, first = gradients_of(model, [leaf])
    assert all(map(are_same, of_leaf_first, of_leaf))
    if second is not None:
        passes(model, values)  # another shard, meanwhile
        second.derive()
    of_leaf_then, then = gradients_of(model, [leaf])
    assert of_leaf_then == [None]
    for expected, early, late in zip(whole, first, then, strict=True):
        assert early is None or late is None
        assert are_same(late if early is None else early, expected)
    return sum(late is not None for late in then)


@pytest.mark.parametrize("name", [*CASES])
def test_the_bits_of_one_part(name: str) -> None:
    make, put_off, parameters = CASES[name]
    torch.manual_seed(1)
    model = make()
    assert sum(p.requires_grad for p in model.parameters()) == parameters
    assert compared(model, torch.randn(4, 5, 8)) == put_off


def test_a_checkpoint_is_computed_again_once() -> None:
    model = Checkpointed(reentrant=False)
    leaf, root = passes(model, torch.randn(4, 5, 8))
    second = derive_first([root], [*model.parameters()])
    assert second is not None
    second.derive()
    assert model.computed == 2
    assert leaf.grad is not None


def test_only_what_may_wait_does_and_a_layer_goes_together() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    leaf, root = passes(model, torch.randn(4, 8))
    second = derive_first([root], [model[0].bias, *model[1].parameters()])
    assert second is not None
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]
    second.derive()
    assert all(p.grad is not None for p in model.parameters())
    assert leaf.grad is not None


def test_a_parameter_that_is_itself_a_root_does_not_wait() -> None:
    model = nn.Linear(8, 8)
    leaf, root = passes(model, torch.randn(4, 8))
    assert derive_first([root, Root(model.weight, torch.ones(8, 8))], [*model.parameters()]) is None
    assert leaf.grad is not None
    assert model.weight.grad is not None


@pytest.fixture
def stream() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(Stream())
        stack.enter_context(products.by(ONEDNN))
        yield


@pytest.mark.skipif(products.lacking() is not None, reason="no oneDNN")
@pytest.mark.usefixtures("stream")
def test_products_of_ours_are_made_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    values = torch.randn(128, 128)
    product, made = products._product, []

    def counted(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made.append(1)
        return product(one, other)

    monkeypatch.setattr(products, "_product", counted)
    assert compared(model, values) == 4
    assert len(made) == 4 + 4  # in one part, and in two


OPERATORS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a @ b,
    lambda a, b: torch.nn.functional.linear(a, b),
    lambda a, b: torch.cat([a, b])[1:5],
    lambda a, b: torch.maximum(a, b),  # not one of those in parts
    lambda a, b: Doubles.apply(a, b.sum()),  # type: ignore[no-untyped-call]
]


class Random(nn.Module):
    """Any graph of operators, of the input and of parameters."""

    def __init__(self, calls: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.randn(4, 4) for _ in range(3))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [*self.values, x]
        for operator, one, other in self.calls:
            made = OPERATORS[operator](values[one % len(values)], values[other % len(values)])
            values.append(made / 3)
        total: torch.Tensor = torch.stack([*values[4:], x]).sum(0)
        return total


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(OPERATORS) - 1), st.integers(0, 20), st.integers(0, 20)),
        min_size=1,
        max_size=10,
    )
)
def test_any_graph(calls: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(2)
    compared(Random(calls), torch.randn(4, 4))
