"""A model and its stages, compared bit for bit over several shards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from support.staged import staged_step, step
from torch import nn

from quorate.replica import nested
from quorate.replica.pipeline.cut import cut


def total(output: Any) -> torch.Tensor:
    found = [t.float().square().mean() for t in nested.tensors(output) if t.is_floating_point()]
    return torch.stack(found).sum()


def same_bits(
    model: nn.Module,
    split: Sequence[str],
    *args: Any,
    loss: Any = total,
    shards: Sequence[tuple[Any, ...]] = (),
) -> Any:
    """Compare the model with its stages over several shards; return the stages."""
    torch.manual_seed(7)
    plain, parts = copy.deepcopy(model), copy.deepcopy(model)
    stages = cut(parts, split, args)
    assert len(stages) == len(split) + 1
    for number, shard in enumerate([args, *shards]):
        found = []
        for one in (plain, parts):
            for parameter in one.parameters():
                parameter.grad = None
            torch.manual_seed(number)
            outputs = (
                step(one, shard, loss) if one is plain else staged_step(one, stages, shard, loss)
            )
            grads = {name: p.grad for name, p in one.named_parameters()}
            found.append((outputs, grads, dict(one.named_buffers()), torch.get_rng_state()))
        (out, grads, buffers, drawn), (out_2, grads_2, buffers_2, drawn_2) = found
        assert len(out) == len(out_2)
        assert all(map(torch.equal, out, out_2))
        assert grads.keys() == grads_2.keys()
        for name, grad in grads.items():
            other = grads_2[name]
            assert (grad is None) == (other is None), name
            assert grad is None or torch.equal(grad.to_dense(), other.to_dense()), name
        for name, buffer in buffers.items():
            assert torch.equal(buffer, buffers_2[name]), name
        assert torch.equal(drawn, drawn_2)
    return stages
