"""Kernels that give the same bits each time: what torch leaves open on a GPU.

cuDNN has several algorithms for a convolution. Some add up with atomics, in the order in which
threads come; and with ``benchmark`` the fastest is chosen by a measurement, in each process anew.
Within ``deterministic`` neither is allowed. For matrix products nothing is done: as far as is known
torch gives cuBLAS a workspace per thread and stream. What is left are operators of torch that add
with atomics (``index_add``, ``scatter_add``, the backward pass of bilinear interpolation and of
most fused attention): ``torch.use_deterministic_algorithms(True)`` in the script replaces or
refuses them, and ``quorate verify`` names them.

cuDNN's recurrent layers have a cuBLAS of their own, which takes its workspace from the environment;
torch's notes on ``torch.nn.LSTM`` say what to set. Not measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from quorate.machine.environment import device_environment
from quorate.replica.precision import Precision, tensor_float

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(devices: Sequence[torch.device]) -> Iterator[list[str]]:
    """Within the block this process's convolutions on GPUs are repeatable.

    Args:
        devices: on which this process computes; without a GPU among them nothing is done.

    Yields what to say: that a choice of the script's is off.
    """
    if all(device.type != "cuda" for device in devices):
        yield []
        return
    cudnn: Any = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    said = []
    if cudnn.benchmark:
        said.append("cudnn.benchmark is off: it chooses kernels by their time, and so other bits")
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield said
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def repeatable(precision: Precision, devices: Sequence[torch.device]) -> Iterator[list[str]]:
    """Within the block this process computes in a precision, and in the same bits each time.

    Yields what to say: which choices of the script's are off.
    """
    with tensor_float(precision) as of_numbers, deterministic(devices) as of_kernels:
        yield [*of_numbers, *of_kernels]


def remarks(model: torch.nn.Module, devices: Sequence[torch.device]) -> list[str]:
    """Return what to say of a model whose bits depend on what the environment lacks."""
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    on_gpu = any(device.type == "cuda" for device in devices)
    if not on_gpu or not recurrent or WORKSPACE in device_environment():
        return []
    return [
        f"the model has recurrent layers: with some versions of cuDNN their bits are not repeatable"
        f" unless the environment has {WORKSPACE}=:4096:2 before the program starts"
    ]
