"""Operators have the CPU's bits, whatever is late; trainings: ``test_on_devices``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums depend on the number of threads; kernels of the devices have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for item in value for each in flat(item)]


def equal(one: Any, other: Any) -> bool:
    pairs = zip(flat(one), flat(other), strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) and a.stride() == b.stride() for a, b in pairs)


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add and mul": (lambda a, b: (a + 2 * b) * 0.3, (rows(5, 4), rows(4))),
    "matmul": (torch.matmul, (rows(3, 5, 4), rows(4, 6))),
    "addmm of a number": (lambda a, b: torch.addmm(rows(1)[0].item() * a, a, b), (rows(6, 6),) * 2),
    "layer norm": (lambda a: F.layer_norm(a, (8,)), (rows(5, 8),)),
    "convolution": (
        lambda a, w, b: F.conv2d(a, w, b, 2, 1, 1, 2),
        (rows(2, 4, 8, 8), rows(6, 2, 3, 3), rows(6)),
    ),
    "channels last": (
        lambda a, w: F.conv2d(a.to(memory_format=torch.channels_last), w),
        (rows(2, 4, 8, 8), rows(6, 4, 3, 3)),
    ),
    "pool": (lambda a: F.max_pool2d(a, 2, return_indices=True), (rows(2, 3, 8, 8),)),
    "embedding": (lambda w: F.embedding(torch.tensor([3, 1, 3]).to(w.device), w), (rows(5, 4),)),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        (rows(2, 2, 16, 8),),
    ),
    "index_put": (
        lambda a: a.index_put((torch.tensor([1, 1, 2]).to(a.device),), a[:3], accumulate=True),
        (rows(5, 4),),
    ),
    "scatter": (
        lambda a: a.scatter_add(0, torch.arange(20).view(5, 4).to(a.device) % 5, a),
        (rows(5, 4),),
    ),
    "bytes": (lambda a: a.view(torch.int32), (rows(3, 4),)),
    "grows": (lambda a: torch.mul(a, 2, out=torch.empty(0, device=a.device)), (rows(4, 3),)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_and_its_gradient(name: str) -> None:
    compute, given = OPERATORS[name]
    found = []
    for device in ("cpu", "sim:1"):
        arguments = [value.detach().to(device) for value in given]
        first = arguments[0].requires_grad_(name != "grows")
        made = compute(*arguments)
        grown = [each for each in flat(made) if each.requires_grad]
        ones = [torch.ones_like(each) for each in grown]
        gradient = torch.autograd.grad(grown, first, ones) if grown else ()
        found.append((made, gradient))
    assert equal(found[0][0], found[1][0])
    assert equal(found[0][1], found[1][1])
