"""Tensors of an accelerator are compared there: the host waits once, and copies only changes."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import quorate
from quorate.replica.beside.values import NewestValues
from quorate.replica.pipeline.buffers import BufferSetter


class Copied(TorchDispatchMode):
    """Counts elements copied to the host."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.device.type == "cpu":
            self.elements += made.numel()
        return made


def test_buffers_of_a_stage_are_compared_with_one_wait() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(4))).to("sim:0")
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    restored = BufferSetter(model, values)
    in_step = torch.sim.calls()[1]
    restored()
    assert torch.sim.calls()[1] == in_step
    model(torch.arange(32.0, device="sim:0").reshape(4, 8))
    assert not torch.equal(model[3].running_mean, values["3.running_mean"])
    restored()
    assert all(map(torch.equal, model.buffers(), values.values()))


def test_tensors_are_compared_where_they_lie() -> None:
    bank, other = torch.zeros(1000, device="sim:0"), torch.zeros(1000, device="sim:1")
    shared = quorate.Shared("teacher", bank=bank, other=other, scale=torch.zeros(3))
    newest = NewestValues()
    first = newest.look()
    with Copied() as copied:
        assert newest.look() is first
    assert copied.elements == 2  # an answer from each device
    for number, written in enumerate((bank, other, shared.scale), start=2):
        written.data[-1] = -0.0
        assert newest.look().number == number
        assert newest.look().number == number
    assert all(view.flatten()[-1].signbit() for view in newest.values.tensors.views.values())
    del first, newest  # and their shared memory
