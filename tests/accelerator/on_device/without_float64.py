"""A device without float64, such as MPS: sums of buffers, and norms, are made on the host."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quorate.replica.buffers import Buffers
from quorate.training.optimizing.mean import squares


class WithoutFloat64(TorchDispatchMode):
    """Refuses float64, as MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            is_here = isinstance(leaf, torch.Tensor) and leaf.device.type == "sim"
            assert not (is_here and leaf.dtype is torch.float64), func
        return made


class Counts(nn.Module):
    """Has a counter, and no floating-point buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return x


@pytest.mark.parametrize("layers", [(Counts,), (lambda: nn.BatchNorm1d(3), Counts)])
def test_sums_are_made_on_the_host(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("replica.buffers", "training.optimizing.mean"):
        monkeypatch.setattr(f"quorate.{user}.has_float64", lambda device: device.type != "sim")
    found = []
    for device in ("cpu", "sim:1"):
        model = nn.Sequential(*(layer() for layer in layers)).to(device)
        batch = torch.arange(12.0, device=device).reshape(4, 3)
        buffers = Buffers(model)
        with WithoutFloat64():
            buffers.begin()
            norms = squares(model(batch).detach().reshape(-1))
            change = buffers.change(4.0)
            buffers.take(change, buffers.integer_buffers(), 1)
            values = buffers.values()
            buffers.set(values, None)
        assert change is not None
        assert values is not None
        state = [tensor.tolist() for tensor in model.state_dict().values()]
        found.append((norms, change.tolist(), values.tolist(), state))
    assert found[0][1:] == found[1][1:]
    assert found[0][0] == pytest.approx(found[1][0])  # of float32 norms
