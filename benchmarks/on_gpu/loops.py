"""Loops that are compared: one written by hand, DistributedDataParallel's, and quorate's.

``how``: "eager"; "compiled" by ``torch.compile`` in the script; "graphs": what each side offers to
replay CUDA graphs, ``torch.compile(mode="reduce-overhead")`` by hand and ``Compute(compile=True)``
in quorate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from on_gpu.job import Job
from on_gpu.networks import Network

UPDATES = 10**9  # of a training whose end is elsewhere

Step = Callable[[], float]


class WithLoss(nn.Module):
    """A model whose forward is the loss: what is compiled and wrapped sees all that is computed."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.model = network.model()
        self.loss = network.loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.loss(self.model, batch)["loss"]


def placed(network: Network, device: torch.device) -> WithLoss:
    """Return the model on a device, with convolutions in the format that is fast there."""
    module: Any = WithLoss(network)
    module.to(device)
    module.to(memory_format=torch.channels_last)
    return module  # type: ignore[no-any-return]


def by_hand(
    network: Network, device: torch.device, how: str, precision: str, *, deterministic: bool
) -> Step:
    """Return one step of the loop that people write; it returns the loss."""
    set_kernels(deterministic=deterministic)
    return _step(network, placed(network, device), device, how, precision)


def by_ddp(network: Network, device: torch.device, how: str, precision: str) -> Step:
    """Return one step of a rank, which has this device."""
    set_kernels(deterministic=False)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    torch.distributed.init_process_group(torch.distributed.get_default_backend_for_device(device))
    wrapped = nn.parallel.DistributedDataParallel(
        placed(network, device), gradient_as_bucket_view=True
    )
    return _step(network, wrapped, device, how, precision)


def _step(
    network: Network, module: nn.Module, device: torch.device, how: str, precision: str
) -> Step:
    on_cpu = device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)  # as quorate
    optimizer = network.optimizer(module.parameters(), fused=True)
    called: Any = module
    if how != "eager":
        called = torch.compile(module, mode="reduce-overhead" if how == "graphs" else "default")
    is_bf16 = precision == "bf16"

    def batches() -> Any:
        while True:
            order = torch.randperm(len(network.tensors[0]))
            for begin in range(0, len(order) - network.rows + 1, network.rows):
                rows = order[begin : begin + network.rows]
                yield [tensor[rows] for tensor in network.tensors]

    each = batches()

    def step() -> float:
        batch = [
            tensor if on_cpu else tensor.pin_memory().to(device, non_blocking=True)
            for tensor in next(each)
        ]
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            loss = called(*batch)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def set_kernels(*, deterministic: bool) -> None:
    """Let torch take the fastest kernels, or only deterministic ones; float32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic)
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False  # it would only cost time


def trainer(network: Network, job: Job, shards: int) -> quorate.Trainer:
    """Return quorate's trainer, with ``network.rows`` rows per update and device."""

    def make() -> Any:
        model = network.model()
        return torch.compile(model) if job.how == "compiled" else model

    return quorate.Trainer(
        make,
        network.loss,
        optimizer=network.optimizer,
        batch_size=network.rows * len(job.devices),
        shards=shards,
        devices=job.devices,
        workers=quorate.Workers(job.workers, engine=job.engine),
        precision=job.precision,
        compute=quorate.Compute(compile=job.how == "graphs", deterministic=job.deterministic),
    )


def updates(network: Network, of: quorate.Trainer, steps: int = UPDATES) -> Any:
    """Return the generator of the updates of a trainer."""
    return of.updates(TensorDataset(*network.tensors), steps=steps)
