"""Calls around every shard in the place of torch's public functions have the same effect."""

from typing import Any

import pytest
import torch

from quorate.replica.flat import Layout
from quorate.replica.quick import torch_calls
from quorate.replica.shared import switches


def gradients(derive: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, dtype=dtype, generator=generator).requires_grad_()
    scale = torch.randn((), dtype=dtype, generator=generator).requires_grad_()
    seen: list[torch.Tensor] = []
    loss = (weight.tanh().sum() * scale).reshape(())
    loss.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient.mul_(3.0))
    derive(loss)
    assert weight.grad is not None
    assert scale.grad is not None
    return [*seen, weight.grad, scale.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_is_derived_as_by_torch(dtype: torch.dtype) -> None:
    for _ in range(2):  # a hook that writes the first gradient writes no second gradient
        ours, torchs = (
            gradients(torch_calls.derive, dtype),
            gradients(torch.autograd.backward, dtype),
        )
        assert all(one.equal(other) for one, other in zip(ours, torchs, strict=True))


def test_where_things_are_made_is_known_without_asking_for_the_default() -> None:
    assert torch_calls.makes_on_cpu()
    with torch.device("meta"):
        assert not torch_calls.makes_on_cpu()
        with torch.device("cpu"):
            assert torch_calls.makes_on_cpu()
    torch.set_default_device("meta")
    try:
        assert not torch_calls.makes_on_cpu()
    finally:
        torch.set_default_device(None)
    assert torch_calls.makes_on_cpu()


def test_switches_are_read_as_by_torchs_public_functions() -> None:
    quick, public = switches.readers(has_gpu=True), switches.SWITCHES
    stood = {name: read() for name, (read, _) in public.items()}
    assert {name: read() for name, read in quick.items()} == stood
    try:
        for name in [*public][4:]:
            public[name][1](not stood[name])
            assert quick[name]() == public[name][0]() == (not stood[name])
    finally:
        for name, (_, set_) in public.items():
            set_(stood[name])
    assert torch_calls.reader(torch.is_grad_enabled, "_no_such_name") is torch.is_grad_enabled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_multiplied_as_by_the_number(dtype: torch.dtype) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    flat = Layout([("a", value)]).new(torch.device("cpu"))
    for factor in (1 / 3, 64.0, 1e-3, 1 / 3, 1.0):
        flat.fill({"a": value}, factor)
        assert flat.views["a"].equal(value * factor)
