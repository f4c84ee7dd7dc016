"""What is set so that a GPU gives the same bits each time; that it does is in test_gpu.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from quorate.machine.devices import Group, current, kinds
from quorate.replica.deterministic import WORKSPACE, deterministic, remarks
from quorate.replica.precision import parse, tensor_float
from quorate.replica.streams import Stream

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
            "cudnn.benchmark is off: it chooses kernels by their time, and so other bits"
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
    with tensor_float(parse(precision)):
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
        key = torch._C.DispatchKey.PreDispatch  # type: ignore[attr-defined]
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
