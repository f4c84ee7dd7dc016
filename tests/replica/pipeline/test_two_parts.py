"""A backward pass in two parts: the bits of a single pass, and the work of the second part."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from quorate.replica.pipeline.buffers import are_same
from quorate.replica.pipeline.two_parts import Root, derive, derive_first


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
    "function": (lambda: nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)), 4, 5),
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
    """Compute a forward pass of a stage: return its leaf, and the start of the backward pass."""
    torch.manual_seed(5)
    leaf = values.clone().requires_grad_()
    output = model(leaf * 1.0)
    return leaf, Root(output, torch.linspace(-1, 1, output.numel()).view_as(output))


def compared(model: nn.Module, values: torch.Tensor) -> int:
    """Compute in one part and in two; return the number of parameters in the second part."""
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


def test_a_parameter_that_is_itself_a_root_does_not_wait() -> None:
    model = nn.Linear(8, 8)
    leaf, root = passes(model, torch.randn(4, 8))
    assert derive_first([root, Root(model.weight, torch.ones(8, 8))], [*model.parameters()]) is None
    assert leaf.grad is not None
    assert model.weight.grad is not None


OPERATORS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a @ b,
    lambda a, b: torch.nn.functional.linear(a, b),
    lambda a, b: torch.cat([a, b])[1:5],
    lambda a, b: torch.maximum(a, b),  # not an operator in parts
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


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
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
