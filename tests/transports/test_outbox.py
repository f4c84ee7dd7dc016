"""The outbox takes gradients while backward makes them, and what it sends is what there is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quorate.coordination.ownership import BLOCK
from quorate.replica.flat import Flat, Layout
from quorate.transports.collective.outbox import Outbox
from quorate.transports.collective.slices import Bucket

FACTOR = 3.7


class Deep(nn.Module):
    """Layers of more than one bucket each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def outbox_of(model: nn.Module) -> Outbox:
    layout = Layout((n, p) for n, p in model.named_parameters())
    (size,) = layout.sizes
    spans = [range(start, min(size, start + BLOCK)) for start in range(0, size, BLOCK)]
    return Outbox(layout.new(torch.device("cpu")), [Bucket(0, span, [span]) for span in spans])


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def filled(outbox: Outbox, values: dict[str, torch.Tensor], factor: float = FACTOR) -> Flat:
    flat = outbox.layout.new(torch.device("cpu"))
    flat.fill(values, factor)
    return flat


def same(one: Flat, other: Flat) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.vectors, other.vectors, strict=True))


def take_all(outbox: Outbox) -> None:
    for number in range(len(outbox.came)):
        outbox.wait(number)


def test_buckets_go_while_backward_runs() -> None:
    model = Deep()
    outbox = outbox_of(model)
    outbox.begin([])
    outbox.expect(dict(model.named_parameters()), FACTOR)
    then: list[int] = []
    model.layers[0].register_full_backward_pre_hook(lambda *_: then.append(len(outbox.came)))
    model(torch.randn(5, 300, requires_grad=True)).sum().backward()
    early = [*outbox.came]
    outbox.fill(grads(model), FACTOR)
    assert 0 < then[0] < len(outbox.came), "the last layers' buckets went before the first layer's"
    assert early == outbox.came, "nothing was left for the end"
    assert early[0] == max(early)
    assert not outbox.is_to_go_again
    take_all(outbox)
    assert same(outbox, filled(outbox, grads(model)))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_what_lies_to_the_left_is_added_bucket_by_bucket() -> None:
    model = Deep()
    outbox = outbox_of(model)
    near, far = (
        filled(outbox, {n: torch.randn_like(p) for n, p in model.named_parameters()})
        for _ in range(2)
    )
    model(torch.randn(5, 300)).sum().backward()
    outbox.begin([near, far])
    outbox.fill(grads(model), FACTOR)
    take_all(outbox)
    expected = filled(outbox, grads(model))
    assert same(outbox, far.add_(near.add_(expected)))


def test_frozen_and_unused_parameters_are_zero() -> None:
    model = Deep()
    model.unused = nn.Linear(300, 300)
    outbox = outbox_of(model)
    for vector in outbox.vectors:
        vector.fill_(7.0)
    model.layers[1].requires_grad_(requires_grad=False)
    outbox.begin([])
    outbox.expect(dict(model.named_parameters()), FACTOR)
    model(torch.randn(5, 300)).sum().backward()
    outbox.fill(grads(model), FACTOR)
    take_all(outbox)
    for name, view in outbox.views.items():
        assert bool((view == 0).all()) == name.startswith(("unused", "layers.1")), name


def test_a_gradient_that_changes_after_it_went_goes_again() -> None:
    model = Deep()
    outbox = outbox_of(model)
    for n in range(4):
        outbox.clear()
        outbox.begin([filled(outbox, {})])
        model.zero_grad()
        outbox.expect(dict(model.named_parameters()), 1.0)
        model(torch.randn(5, 300)).sum().backward()
        assert bool(outbox.came) == (n < 3), "whoever changes it each time is waited for"
        model.layers[3].weight.grad.mul_(2)  # by a hook of the user's, say
        outbox.fill(grads(model), 1.0)
        take_all(outbox)
        assert outbox.is_to_go_again == (n < 3)
        outbox.go_again()
        assert same(outbox, filled(outbox, grads(model), 1.0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_within_backward(reentrant: bool) -> None:
    """A layer that is used twice, under checkpoints that run backward by themselves."""
    layer = nn.Linear(300, 300)
    outbox = outbox_of(layer)
    outbox.begin([])
    outbox.expect(dict(layer.named_parameters()), FACTOR)
    x = torch.randn(5, 300, requires_grad=True)
    for _ in range(2):
        x = checkpoint(lambda t: layer(t).relu(), x, use_reentrant=reentrant)
    x.sum().backward()
    outbox.fill(grads(layer), FACTOR)
    take_all(outbox)
    outbox.go_again()
    assert same(outbox, filled(outbox, grads(layer)))


def test_a_shard_that_is_computed_anew() -> None:
    model = Deep()
    outbox = outbox_of(model)
    outbox.begin([])
    for _ in range(2):
        model.zero_grad()
        outbox.expect(dict(model.named_parameters()), FACTOR)
        model(torch.randn(5, 300)).sum().backward()
    outbox.fill(grads(model), FACTOR)
    take_all(outbox)
    assert outbox.is_to_go_again
    outbox.go_again()
    assert same(outbox, filled(outbox, grads(model)))


def test_whoever_waits_hears_of_an_end() -> None:
    outbox = outbox_of(Deep())
    outbox.leave(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        outbox.wait(0)
    outbox.clear()
    outbox.release()  # something was raised: nobody is to wait
    take_all(outbox)
