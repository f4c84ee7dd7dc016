"""Adam's kernel, called alone, makes torch's own step; where that would do more, torch makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Adam, AdamW, Optimizer

from quorate.training.optimizing.block_steps import step_flat
from quorate.training.optimizing.kernels import adam as kernel
from quorate.training.optimizing.kernels.adam import step_by_kernel

Change = Callable[[Optimizer], object]


def made(kind: type[Optimizer], dtype: torch.dtype, **options: Any) -> Optimizer:
    generator = torch.Generator().manual_seed(0)
    sizes = (100, 2048 + 7, 48)
    first, *rest = [torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes]
    groups = [
        {"params": [torch.nn.Parameter(first.to(dtype))], "lr": 0.01},
        {
            "params": [torch.nn.Parameter(each.to(dtype)) for each in rest],
            "weight_decay": 0.1,
            "betas": (0.8, 0.99),
            "maximize": True,
        },
    ]
    return kind(groups, fused=True, **options)  # type: ignore[arg-type]


def tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def bits(optimizer: Optimizer) -> list[torch.Tensor]:
    own = tensors(optimizer)
    values = [value for tensor in own for _, value in sorted(optimizer.state[tensor].items())]
    return [*(tensor.detach() for tensor in own), *values]


def give(optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for tensor in tensors(optimizer):
        wide = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.grad = wide.to(tensor.dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernel was called alone in each step that was asked for."""
    seen: list[bool] = []

    def counted(optimizer: Optimizer) -> bool:
        seen.append(step_by_kernel(optimizer))
        return seen[-1]

    monkeypatch.setattr("quorate.training.optimizing.block_steps.step_by_kernel", counted)
    return seen


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_makes_the_same_step(
    kind: type[Optimizer], dtype: torch.dtype, calls: list[bool]
) -> None:
    ours, torchs = made(kind, dtype), made(kind, dtype)
    for number in range(6):
        for optimizer in (ours, torchs):
            give(optimizer, number)
            if number == 3:  # as a schedule of the user's own, and a parameter that is left out
                optimizer.param_groups[0]["lr"] = 0.5
                tensors(optimizer)[1].grad = None
        with torch.no_grad():
            step_flat(ours, 1)
        torchs.step()
        assert all(map(torch.equal, bits(ours), bits(torchs)))
    # The first step makes the state, as ever.
    assert calls == [False, True, True, True, True, True]


def to_tensor(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = torch.tensor(0.01)


def to_unfused(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["fused"] = False


def scaled(optimizer: Optimizer) -> None:
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]


def widened(optimizer: Optimizer) -> None:
    optimizer.state[tensors(optimizer)[0]]["own"] = 1


@pytest.mark.parametrize("change", [to_tensor, to_unfused, scaled, widened])
def test_what_is_more_than_a_call_of_the_kernel_is_torchs(
    change: Change, calls: list[bool]
) -> None:
    ours, torchs = made(Adam, torch.float32), made(Adam, torch.float32)
    for number in range(4):
        for optimizer in (ours, torchs):
            give(optimizer, number)
            if number == 2:
                change(optimizer)
        with torch.no_grad():
            step_flat(ours, 1)
        torchs.step()
    assert calls == [False, True, False, False]
    for optimizer in (ours, torchs):
        optimizer.state[tensors(optimizer)[0]].pop("own", None)
    assert all(map(torch.equal, bits(ours), bits(torchs)))


def test_amsgrad_bfloat16_subclasses_and_gradients_that_are_on_are_torchs() -> None:
    class Own(Adam):
        pass

    of_others = (
        made(Adam, torch.float32, amsgrad=True),
        made(Adam, torch.bfloat16),
        made(Own, torch.float32),
    )
    for optimizer in of_others:
        give(optimizer, 0)
        optimizer.step()
        with torch.no_grad():
            assert not step_by_kernel(optimizer)
    plain = made(Adam, torch.float32)
    give(plain, 0)
    plain.step()
    assert not step_by_kernel(plain)


def test_a_torch_without_the_kernel_steps_as_ever(
    monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    monkeypatch.setattr(kernel, "fused_adam", None)
    optimizer = made(Adam, torch.float32)
    for number in range(2):
        give(optimizer, number)
        with torch.no_grad():
            step_flat(optimizer, 1)
    assert calls == [False, False]


def test_what_listens_to_steps_hears_them(calls: list[bool]) -> None:
    optimizer, heard = made(Adam, torch.float32), list[int]()
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    for number in range(3):
        give(optimizer, number)
        with torch.no_grad():
            step_flat(optimizer, 1)
    assert (heard, calls) == ([1, 1, 1], [])
