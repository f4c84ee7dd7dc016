"""What is set so that a GPU gives the same bits each time; that it does is in test_gpu.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import front_door
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

from quorate.errors import UserError
from quorate.machine.devices import Group, current, kinds
from quorate.replica.computing import Computing
from quorate.replica.deterministic import WORKSPACE, deterministic, remarks, repeatable
from quorate.replica.digest import digest
from quorate.replica.precision import float32_products, parse
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import STREAM_KEY

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CUDNN: Any = torch.backends.cudnn


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    before = CUDNN.deterministic, CUDNN.benchmark
    yield
    CUDNN.deterministic, CUDNN.benchmark = before


def test_convolutions_are_repeatable_where_a_gpu_computes() -> None:
    CUDNN.benchmark = True
    with deterministic([CPU, GPU]) as said:
        assert (CUDNN.deterministic, CUDNN.benchmark) == (True, False)
        assert said == [
            "cudnn.benchmark is off now: a choice of kernels by measured time changes the bits"
        ]
    assert (CUDNN.deterministic, CUDNN.benchmark) == (False, True)
    with deterministic([CPU, CPU]) as said:
        assert (CUDNN.deterministic, CUDNN.benchmark, said) == (False, True, [])
    CUDNN.benchmark = False
    with deterministic([GPU]) as said:
        assert said == []


def test_what_recurrent_layers_need_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    recurrent = nn.Sequential(nn.LSTM(2, 2))
    assert f"{WORKSPACE}=:4096:2" in remarks(recurrent, [GPU])[0]
    assert remarks(recurrent, [CPU]) == []
    assert remarks(nn.Linear(2, 2), [GPU]) == []
    monkeypatch.setenv(WORKSPACE, ":16:8")
    assert remarks(recurrent, [GPU]) == []


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_older_names_of_torchs_flags_agree_with_the_newer(precision: str) -> None:
    wanted = precision == "tf32"
    with float32_products(parse(precision)):
        assert torch.backends.cuda.matmul.allow_tf32 is wanted
        assert CUDNN.allow_tf32 is wanted
        assert torch.get_float32_matmul_precision() == ("high" if wanted else "highest")
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert CUDNN.allow_tf32 is True


def test_sorts_of_devices_have_bits_of_their_own() -> None:
    cpu, meta = Group([CPU]), Group([torch.device("meta")])
    assert kinds([cpu, cpu]) == {"cpu"}
    assert kinds([cpu, meta]) == {"cpu", "meta"}
    with current(CPU):
        assert torch.zeros(1).device == CPU


def test_a_thread_with_the_key_of_a_stream_and_no_stream_draws_from_the_process() -> None:
    # So is one of autograd, which computes a backward pass on a GPU.
    drawn = []

    def draw() -> None:
        key = torch._C._parse_dispatch_key(STREAM_KEY)  # type: ignore[attr-defined]
        with torch._C._IncludeDispatchKeyGuard(key):
            torch.manual_seed(3)
            drawn.append(torch.rand(4))

    state = torch.get_rng_state()
    try:
        with Stream():
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
        torch.manual_seed(3)
        assert torch.equal(drawn[0], torch.rand(4))
    finally:
        torch.set_rng_state(state)


# --- operators that add in any order -------------------------------------------------------------

INDICES = TensorDataset(
    torch.randint(0, 7, (16, 25_000), generator=torch.Generator().manual_seed(1))
)


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
    trainer = front_door.trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=4,
        shards=2,
        devices="cpu",
        engine="towers",
        **options,
    )
    said: list[str] = []
    trainer._say = said.append
    for _ in trainer.updates(INDICES, steps=6):
        pass
    return digest(trainer.model.state_dict().items()), said


def test_two_threads_add_in_one_order() -> None:
    found = [trained(Bag, bag_loss, workers=n, threads=2) for n in (1, 1, 2)]
    assert len({sums for sums, _ in found}) == 1
    assert any(line.startswith("deterministic=True") for line in found[0][1])
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_thread_has_one_order_anyway() -> None:
    flags = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        flags.append(torch.are_deterministic_algorithms_enabled())
        return bag_loss(model, batch)

    for options in ({"threads": 1}, {"threads": 2, "deterministic": False}, {"update": "async"}):
        _, said = trained(Bag, loss, workers=1, **options)
        assert not any(line.startswith("deterministic") for line in said)
    assert not any(flags)


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


def test_a_gpu_without_a_workspace_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = Computing(deterministic=True)
    monkeypatch.delenv(WORKSPACE, raising=False)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with repeatable(computing, [GPU]) as said:
        assert torch.get_deterministic_debug_mode() == 1
        assert f"the environment lacks {WORKSPACE}=:4096:8" in said[-1]
        assert not torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv(WORKSPACE, ":4096:8")
    with repeatable(computing, [GPU]):
        assert torch.get_deterministic_debug_mode() == 2
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory is filled
