"""The settings for the same bits each time on a GPU; the effect is tested in test_gpu.py."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from support.digests import digest_of
from support.fits import fit
from support.messages import expect_error
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from quorate import Compute, Trainer, Workers
from quorate.errors import SameBitsError, UserError
from quorate.machine.devices import Group
from quorate.replica.computing import Computing
from quorate.replica.deterministic import WORKSPACE, deterministic, remarks, repeatable
from quorate.training.replicas import ReplicaFactory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CUDNN: Any = torch.backends.cudnn


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    before = CUDNN.deterministic, CUDNN.benchmark
    yield
    CUDNN.deterministic, CUDNN.benchmark = before


def test_convolutions_are_repeatable_where_a_gpu_computes() -> None:
    CUDNN.benchmark, CUDNN.deterministic = True, False
    with deterministic([CPU, GPU]) as said:
        assert (CUDNN.deterministic, CUDNN.benchmark) == (True, False)
        assert said == [
            "cudnn.benchmark is off now: a choice of kernels by measured time changes the bits"
        ]
    assert (CUDNN.deterministic, CUDNN.benchmark) == (False, True)
    with deterministic([CPU, CPU]) as said:
        assert (CUDNN.deterministic, CUDNN.benchmark, said) == (False, True, [])


# --- operators with additions in any order --------------------------------------------------------

INDICES = TensorDataset(
    torch.randint(0, 7, (16, 25_000), generator=torch.Generator().manual_seed(1))
)


SHAPE: dict[str, Any] = {"batch_size": 4, "shards": 2, "engine": "towers", "steps": 6}


class Bag(nn.Module):
    """Adds 50,000 values up in 7 places: with two threads in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(50_000, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(7).index_put((x,), self.w * 1.0, accumulate=True)


def bag_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    value: torch.Tensor = model(batch[0].flatten()).square().mean()
    return value


def trained(model: Any, loss: Any, **options: Any) -> tuple[str, list[str]]:
    with redirect_stdout(io.StringIO()) as said:
        trainer = fit(model, loss, INDICES, **SHAPE, **options)
    return digest_of(trainer), said.getvalue().splitlines()


def test_two_threads_add_in_one_order_and_one_thread_has_it_anyway() -> None:
    flags = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        flags.append(torch.are_deterministic_algorithms_enabled())
        return bag_loss(model, batch)

    found = [trained(Bag, loss, workers=n, threads=2) for n in (1, 1, 2)]
    assert len({sums for sums, _ in found}) == 1
    assert any(line.startswith("deterministic=True") for line in found[0][1])
    assert all(flags)
    flags.clear()
    for options in ({"threads": 1}, {"threads": 2, "deterministic": False}, {"update": "async"}):
        _, said = trained(Bag, loss, workers=1, **options)
        assert not any(line.startswith("deterministic") for line in said)
    assert not any(flags)


def test_loops_that_end_in_any_order_leave_the_settings_of_the_process_as_before() -> None:
    def settings() -> tuple[object, ...]:
        modes = torch.get_deterministic_debug_mode(), inductor.deterministic
        return *modes, CUDNN.conv.fp32_precision, torch.get_num_threads(), sys.getswitchinterval()

    before, options = settings(), {"batch_size": 4, "optimizer": SGD}
    options["workers"] = Workers(2, engine="towers", threads=3)
    first, second = (Trainer(Bag, bag_loss, **options).updates(INDICES, steps=6) for _ in "12")
    drawn = torch.rand((), generator=torch.manual_seed(5))
    torch.manual_seed(5)
    next(first)
    inside = settings()
    assert not any(ours == others for ours, others in zip(inside, before, strict=True))
    next(second)
    first.close()
    assert settings() == inside
    torch.rand(())  # in the body of the second loop, whose stream is not the script's
    second.close()
    assert settings() == before
    assert torch.rand(()) == drawn


def test_an_operator_without_one_order_is_named() -> None:
    class Put(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w * torch.zeros(4).put_(x[0, :2] % 4, torch.ones(2))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value: torch.Tensor = model(batch[0]).sum()
        return value

    with expect_error(UserError) as raised:
        trained(Put, loss, workers=1, threads=2)
    assert raised.value.name.startswith("put_ (test_deterministic.py:")
    trained(Put, loss, workers=1, threads=2, deterministic=False)


def test_cublas_has_workspaces_of_one_size_if_cuda_has_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recurrent, computing = nn.Sequential(nn.LSTM(2, 2)), Computing(deterministic=True)
    monkeypatch.setattr("quorate.replica.deterministic._is_too_late", False)
    monkeypatch.setenv(WORKSPACE, "")  # to restore the variable
    monkeypatch.delenv(WORKSPACE)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    assert f"{WORKSPACE}=:4096:8" in remarks(recurrent, [GPU])[0]
    assert remarks(recurrent, [CPU]) == remarks(nn.Linear(2, 2), [GPU]) == []
    strict = {"batch_size": 4, "optimizer": SGD, "compute": Compute(strict=True)}
    recipe = Trainer(nn.Linear(2, 2), bag_loss, **strict)._config

    ReplicaFactory(recipe, [Group([CPU])])
    assert WORKSPACE not in os.environ
    ReplicaFactory(recipe, [Group([GPU])]).tell(print)
    assert os.environ[WORKSPACE] == ":4096:8"  # worker processes have the variable too
    assert remarks(recurrent, [GPU]) == []
    with repeatable(computing, [GPU]):
        assert torch.get_deterministic_debug_mode() == 2
        assert not torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv(WORKSPACE, ":4096:2")
    with expect_error(SameBitsError, name="strict"):
        ReplicaFactory(recipe, [Group([GPU])]).tell(print)
    monkeypatch.delenv(WORKSPACE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for _ in range(2):  # a second Trainer finds the variable, which CUDA has not read
        with expect_error(SameBitsError, name="strict"):
            ReplicaFactory(recipe, [Group([GPU])]).tell(print)
    assert os.environ[WORKSPACE] == ":4096:8"
    with repeatable(computing, [GPU]) as said:
        assert torch.get_deterministic_debug_mode() == 1
        assert "torch only warns" in said[-1]
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory is filled
