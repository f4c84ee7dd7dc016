"""Operators have the CPU's bits, whatever is late; trainings: ``test_on_devices``."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.usefixtures("one_thread")


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
    "unique": (lambda a: (a > 0).long().unique(return_counts=True), (rows(9, 4),)),
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


def test_the_host_waits_for_few_operators() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).to("sim:3")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = torch.sim.calls()
    for _ in range(5):
        optimizer.zero_grad()
        targets = torch.arange(12).to("sim:3") % 3
        F.cross_entropy(model(rows(12, 4, 6).to("sim:3")), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    late, in_step = (now - then for now, then in zip(torch.sim.calls(), before, strict=True))
    assert in_step < late / 20


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_cells_are_the_cpus_but_for_rounding(kind: type[nn.RNNBase]) -> None:
    """Accelerators use torch's fused cells, with another order of additions."""
    model = kind(6, 5, batch_first=True)
    gradients = []
    for device in ("cpu", "sim:1"):
        own = copy.deepcopy(model).to(device)
        own(rows(4, 7, 6).to(device))[0].square().sum().backward()
        gradients.append([parameter.grad.cpu() for parameter in own.parameters()])
    torch.testing.assert_close(*gradients)


def test_attention_is_flash_where_the_cpus_is() -> None:
    query = rows(2, 2, 64, 16).to("sim:0")
    flash = F.scaled_dot_product_attention(query, query, query)
    with sdpa_kernel(SDPBackend.MATH):
        assert not equal(flash, F.scaled_dot_product_attention(query, query, query))


def test_draws_are_the_cpus_for_equal_seeds() -> None:
    drawn = []
    for device in ("cpu", "sim:2"):
        generator = torch.Generator(device).manual_seed(7)
        values = [torch.randn(5, device=device, generator=generator) for _ in range(3)]
        drawn.append([*values, torch.randperm(9, device=device, generator=generator)])
    assert equal(*drawn)


def test_the_state_of_random_numbers_is_that_after_all_draws() -> None:
    torch.manual_seed(3)
    torch.randn(100, device="sim:0")
    state = torch.sim.get_rng_state(0)
    expected = torch.randn(5, device="sim:0").cpu()
    torch.sim.set_rng_state(state, 0)
    assert torch.equal(torch.randn(5, device="sim:0").cpu(), expected)
