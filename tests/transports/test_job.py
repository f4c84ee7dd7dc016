"""Jobs: how a worker process finds the class of what it is to compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quorate.coordination.keys import key
from quorate.coordination.plan import Plan
from quorate.replica.streams import Stream
from quorate.transports.job import Evaluation, Training, class_name, class_of, drawing


@pytest.mark.parametrize("kind", [Training, Evaluation])
def test_the_class_of_a_job_is_found_by_its_name(kind: Any) -> None:
    assert class_of(class_name(kind.__new__(kind))) is kind


def test_whoever_uses_a_transport_may_bring_a_job_of_their_own() -> None:
    name = "quorate.commands.verify.recorded_training:RecordedTraining"
    assert issubclass(class_of(name), Training)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("os:system", "a module of quorate"),
        ("quorated.job:Training", "a module of quorate"),
        ("quorate.transports.job:Task", "a subclass of Job"),
        ("quorate.transports.job:Nobody", "a subclass of Job"),
        ("quorate.transports.job", "a subclass of Job"),
    ],
)
def test_no_other_name_is_followed(name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"got '{name}', expected .*{expected}"):
        class_of(name)


def test_draws_are_keyed_by_the_update_whoever_drew_before_and_within_each_other() -> None:
    def drawn(n: int) -> torch.Tensor:
        with Stream() as stream:
            stream.reseed(key("update", plan.seed, n))
            return torch.rand(3)

    plan = Plan(rows=8, batch_size=4, shards=2, seed=5)
    state = torch.get_rng_state()
    with drawing("update", plan, 1):
        assert torch.equal(torch.rand(3), drawn(1))
        with drawing("update", plan, 2):
            assert torch.equal(torch.rand(3), drawn(2))
        assert not torch.equal(torch.rand(3), drawn(1))  # it goes on where it was
    with pytest.raises(ZeroDivisionError), drawing("update", plan, 3):
        torch.rand(3).tolist()[0] / 0
    with drawing("update", plan, 1):
        assert torch.equal(torch.rand(3), drawn(1))
    assert torch.equal(torch.get_rng_state(), state)
