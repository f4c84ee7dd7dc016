"""Calls that want a process group: which call it was, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from support.messages import expect_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from quorate.errors import UserError
from quorate.replica.witness.places import place_doubts, reads_of_shards
from quorate.transports import process_group

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)
dist: Any = torch.distributed
one = torch.zeros(1)

CALLS: dict[str, Callable[[], object]] = {
    "get_rank": lambda: dist.get_rank(),
    "get_world_size": lambda: dist.get_world_size(),
    "barrier": lambda: dist.barrier(),
    "all_reduce": lambda: dist.all_reduce(one),
    "reduce": lambda: dist.reduce(one, 0),
    "broadcast": lambda: dist.broadcast(one, 0),
    "all_gather": lambda: dist.all_gather([one], one),
    "all_gather_object": lambda: dist.all_gather_object([None], 1),
    "new_group": lambda: dist.new_group([0]),
    "init_process_group": lambda: dist.init_process_group("gloo"),
    "destroy_process_group": lambda: dist.destroy_process_group(),
    "DistributedDataParallel": lambda: DistributedDataParallel(nn.Linear(1, 1)),
    "DistributedSampler": lambda: DistributedSampler([1, 2]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_named_with_its_line_and_a_cure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(Exception) as raised:  # noqa: PT011  torch has several
        CALLS[name]()
    refusal = process_group.refused_call(raised.value)
    assert refusal is not None
    text = str(refusal)
    assert text.startswith(f"{name}() (test_process_group.py:")
    assert "leave it out" in text or "give Trainer the model itself" in text


def test_other_errors_are_no_calls() -> None:
    with pytest.raises(ValueError, match="mine") as raised:
        raise ValueError("mine")
    assert process_group.refused_call(raised.value) is None
    assert process_group.refused_call(ValueError("never raised")) is None


def reads_its_rank(model: Any, batch: Any) -> Any:
    import os

    return model(batch) * int(os.environ["RANK"])


def calls_a_function(model: Any, batch: Any) -> Any:
    return reads_its_rank(model, batch)


def names_it_in_a_batch(model: Any, batch: Any) -> Any:
    return model(batch["RANK"])


def makes_a_group(model: Any, batch: Any) -> Any:
    dist.init_process_group("gloo")
    return model(batch)


def test_what_code_of_shards_reads_is_found_by_name() -> None:
    model = nn.Linear(1, 1)
    for loss in (reads_its_rank, calls_a_function):
        (doubt,) = place_doubts(model, loss)
        assert doubt.startswith("the model or the loss reads RANK (test_process_group.py:")
    assert place_doubts(model, names_it_in_a_batch) == []
    makers = process_group.MAKERS
    assert [*reads_of_shards(model, reads_its_rank, makers)] == []
    with expect_error(UserError):
        process_group.require_none_made(reads_of_shards(model, makes_a_group, makers))
