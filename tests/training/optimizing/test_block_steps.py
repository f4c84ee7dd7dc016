"""A step in blocks has the bits of a step, for each optimizer that works element by element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from quorate.training.optimizing import block_steps, cores
from quorate.training.optimizing.block_steps import step_flat
from quorate.training.optimizing.known_optimizers import ELEMENTWISE
from quorate.training.optimizing.mean import SPAN

OPTIONS: dict[str, dict[str, object]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "NAdam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
}
KINDS = sorted(ELEMENTWISE, key=lambda kind: kind.__name__)


def made(
    kind: type[Optimizer], dtype: torch.dtype, sizes: list[int], seed: int, **options: object
) -> Optimizer:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    parameters = [torch.nn.Parameter(tensor.to(dtype)) for tensor in tensors]
    groups = [
        {"params": parameters[:1], "lr": 0.01},
        {"params": parameters[1:], "lr": 0.02, "weight_decay": 0.1},
    ]
    return kind(groups, **{**OPTIONS.get(kind.__name__, {}), **options})  # type: ignore[arg-type]


def trained(optimizer: Optimizer, step: Callable[[], object], seed: int, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                gradient = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.grad = gradient.to(tensor.dtype)
        step()


def bits(optimizer: Optimizer) -> list[torch.Tensor]:
    found = []
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            found += [tensor.detach(), *map(torch.as_tensor, optimizer.state[tensor].values())]
    return found


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each step had that was made in blocks; all are, whatever their length."""
    seen, blocks = list[int](), block_steps._blocks

    def counted(optimizer: Optimizer) -> list[block_steps._Block]:
        found = list(blocks(optimizer))
        seen.append(len(found))
        return found

    monkeypatch.setattr(block_steps, "_blocks", counted)
    monkeypatch.setattr(cores, "ALL_CORES_FROM", 1)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_step_in_blocks_has_the_bits_of_a_step(
    kind: type[Optimizer], dtype: torch.dtype, in_blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype.is_complex and kind is torch.optim.Rprop:
        pytest.skip("torch's own does not take complex numbers")

    @settings(max_examples=3, deadline=None, database=None)
    @given(
        beside=st.integers(-70, 70),
        spans=st.integers(1, 2),
        taken=st.integers(1, 3),
        seed=st.integers(0, 99),
    )
    def check(beside: int, spans: int, taken: int, seed: int) -> None:
        monkeypatch.setattr(cores, "usable_cores", lambda: taken)
        sizes = [spans * SPAN + beside, 48]
        mine, plain = (made(kind, dtype, sizes, seed) for _ in range(2))
        in_blocks.clear()
        trained(mine, lambda: step_flat(mine, 1), seed)
        # The first step makes the state, whole.
        assert in_blocks[-2:] == [spans + (beside > 0) + 1] * 2
        with cores.intra_op_threads(1):
            trained(plain, plain.step, seed)
        for one, other in zip(bits(mine), bits(plain), strict=True):
            assert torch.equal(one, other)

    check()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adam, {"fused": True}), (torch.optim.SGD, {"momentum": 0, "nesterov": False})],
)
def test_fused_kernels_and_what_has_no_state_step_as_ever(
    kind: type[Optimizer], options: dict[str, object], in_blocks: list[int]
) -> None:
    optimizer = made(kind, torch.float32, [100, 48], 0, **options)
    trained(optimizer, lambda: step_flat(optimizer, 1), 1)
    assert in_blocks == []


@pytest.mark.parametrize("threads", [2, 3])
def test_the_first_step_has_the_bits_of_one_thread(threads: int, in_blocks: list[int]) -> None:
    """In bfloat16 the ends of OpenMP's pieces had others."""
    mine, plain = (made(torch.optim.RMSprop, torch.bfloat16, [SPAN + 98, 48], 0) for _ in range(2))
    with cores.intra_op_threads(threads):
        trained(mine, lambda: step_flat(mine, 1), 0, steps=1)
    with cores.intra_op_threads(1):
        trained(plain, plain.step, 0, steps=1)
    assert in_blocks == []
    assert all(map(torch.equal, bits(mine), bits(plain)))


def test_what_has_no_gradient_is_left_alone(in_blocks: list[int]) -> None:
    optimizer = made(torch.optim.RMSprop, torch.float32, [100, 48], 0)
    trained(optimizer, lambda: step_flat(optimizer, 1), 1)
    still = optimizer.param_groups[1]["params"][0]
    before = still.detach().clone()
    steps = float(optimizer.state[still]["step"])
    still.grad = None
    step_flat(optimizer, 1)
    assert in_blocks == [2, 2, 1]
    assert torch.equal(still, before)
    assert float(optimizer.state[still]["step"]) == steps


def test_a_schedule_counts_steps_and_gradients_stay(in_blocks: list[int]) -> None:
    optimizer = made(torch.optim.NAdam, torch.float32, [100, 48], 0)
    schedule = StepLR(optimizer, 1, gamma=0.5)

    def step() -> None:
        assert step_flat(optimizer, 1)
        assert all(t.grad is not None for group in optimizer.param_groups for t in group["params"])
        schedule.step()  # it would warn, and a warning is an error here

    trained(optimizer, step, 1)
    assert len(in_blocks) == 2
    assert optimizer.param_groups[0]["lr"] == 0.01 / 8


def test_hooks_see_whole_gradients(in_blocks: list[int]) -> None:
    optimizer, seen = made(torch.optim.RMSprop, torch.float32, [100, 48], 0), list[int]()
    optimizer.register_step_pre_hook(
        lambda it, _arguments, _words: seen.append(it.param_groups[0]["params"][0].grad.numel())
    )
    trained(optimizer, lambda: step_flat(optimizer, 1), 1)
    assert seen == [100] * 3
    assert in_blocks == []
