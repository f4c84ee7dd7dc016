"""Dropped waits are found (more by ``faults/``); code with its waits is never accused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

SIZE = 4096
ROUNDS = 20


def side(device: str = "sim:0") -> torch.Stream:
    return torch.Stream(device)


def ones(device: str = "sim:0") -> torch.Tensor:
    return torch.ones(SIZE, device=device)


def test_a_result_of_a_side_stream_is_read_without_a_wait() -> None:
    stream = side()
    with stream:
        made = ones() + 1
    with pytest.raises(RuntimeError, match="unordered access: stream 0 reads") as error:
        made.sum()
    assert str(error.value).count("order.py:") >= 2  # both stacks


@pytest.mark.parametrize("how", ["stream", "event", "synchronize", "query", "host"])
def test_waits_of_all_kinds_are_seen(how: str) -> None:
    before = torch.sim.faults()
    for _ in range(ROUNDS):
        values = ones()
        stream = side()
        stream.wait_stream(torch.accelerator.current_stream(0))
        with stream:
            made = values + 1
            event = stream.record_event()
        if how == "stream":
            torch.accelerator.current_stream(0).wait_stream(stream)
        elif how == "event":
            torch.accelerator.current_stream(0).wait_event(event)
        elif how == "synchronize":
            torch.accelerator.synchronize(0)
        elif how == "query":
            while not event.query():
                pass
        else:
            event.synchronize()
        assert made.sum().item() == 2 * SIZE
        made.record_stream(torch.accelerator.current_stream(0))
        values.record_stream(stream)
    assert torch.sim.faults() == before


def test_an_event_knows_only_what_came_before_it() -> None:
    stream = side()
    with stream:
        event = stream.record_event()
        made = ones() + 1
    torch.accelerator.current_stream(0).wait_event(event)
    with pytest.raises(RuntimeError, match="unordered access"):
        made.sum()


def test_waits_go_on_from_stream_to_stream() -> None:
    first, second = side(), side()
    with first:
        made = ones() + 1
    second.wait_stream(first)
    torch.accelerator.current_stream(0).wait_stream(second)
    assert made.sum().item() == 2 * SIZE


def test_a_copy_between_devices_is_in_order_with_both() -> None:
    for _ in range(ROUNDS):
        source = ones("sim:0")
        target = torch.zeros(SIZE, device="sim:1")
        target.add_(3)
        target.copy_(source, non_blocking=True)
        source.zero_()
        assert target.sum().item() == SIZE


@pytest.mark.parametrize("how", ["record_stream", "wait"])
def test_memory_that_is_recorded_or_waited_for_may_be_freed(how: str) -> None:
    for _ in range(ROUNDS):
        stream = side()
        values = ones()
        stream.wait_stream(torch.accelerator.current_stream(0))
        with stream:
            made = values + 1
        if how == "record_stream":
            values.record_stream(stream)
        else:
            torch.accelerator.current_stream(0).wait_stream(stream)
        del values
        again = torch.zeros(SIZE, device="sim:0")
        torch.accelerator.current_stream(0).wait_stream(stream)
        assert made.sum().item() == 2 * SIZE
        assert again.sum().item() == 0


def test_what_pinned_memory_gets_is_late() -> None:
    values = ones()
    wrong = 0
    for _ in range(ROUNDS):
        late = torch.zeros(SIZE, pin_memory=True)
        for _ in range(20):
            values.mul_(1)
        late.copy_(values, non_blocking=True)
        wrong += bool(late[-1] == 0)
        torch.accelerator.synchronize(0)
        assert late.sum() == SIZE
    assert wrong > 0


def test_the_host_waits_for_few_operators() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).to("sim:3")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = torch.sim.calls()
    for _ in range(5):
        optimizer.zero_grad()
        targets = torch.arange(12).to("sim:3") % 3
        F.cross_entropy(model(torch.randn(12, 4, 6).to("sim:3")), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    late, in_step = (now - then for now, then in zip(torch.sim.calls(), before, strict=True))
    assert in_step < late / 20
