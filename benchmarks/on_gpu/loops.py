"""The loop that people write, and that of Lightning Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from seed_network import timed

from on_gpu.works import WORKS, Work


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def batches(work: Work) -> Iterator[list[torch.Tensor]]:
    """Shuffled rows on the host, for ever."""
    tensors = work.tensors()
    while True:
        order = torch.randperm(len(tensors[0]))
        for rows in order.split(work.rows)[: len(order) // work.rows]:
            yield [tensor[rows] for tensor in tensors]


def by_hand(name: str, device: torch.device, precision: str, how: str, steps: int) -> float:
    """Examples per second of the loop that people write; ``how``: "", "tuned" or "compile"."""
    work, tuned = WORKS[name], how == "tuned"
    model = work.network().to(device)
    if tuned:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = work.optimizer(model.parameters(), **({"fused": True} if tuned else {}))
    called: Any = torch.compile(model) if how == "compile" else model
    each = batches(work)

    def operations() -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

    def step() -> None:
        batch = [tensor.to(device, non_blocking=True) for tensor in next(each)]
        optimizer.zero_grad()
        with operations():
            value = work.loss(called, batch)["loss"]
        value.backward()
        optimizer.step()
        value.item()

    def wait() -> None:
        synchronize(device)

    return timed(step, work.rows, steps, wait, wait)


def with_fabric(name: str, device: torch.device, precision: str, steps: int) -> float:
    """Examples per second of Lightning Fabric on one device."""
    from lightning_fabric import Fabric

    work = WORKS[name]
    fabric = Fabric(
        accelerator=device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[precision],
    )
    fabric.launch()
    network = work.network()
    model, optimizer = fabric.setup(network, work.optimizer(network.parameters()))
    model.mark_forward_method("logits") if name == "chatbot" else None
    each = batches(work)

    def step() -> None:
        batch = fabric.to_device(next(each))
        optimizer.zero_grad()
        with fabric.autocast():
            value = work.loss(model, batch)["loss"]
        fabric.backward(value)
        optimizer.step()
        value.item()

    def wait() -> None:
        synchronize(device)

    return timed(step, work.rows, steps, wait, wait)
