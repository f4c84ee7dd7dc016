"""Jobs: how a worker process finds the class of what it is to compute."""

from __future__ import annotations

from typing import Any

import pytest

from quorate.transports.job import Evaluation, Training, class_name, class_of


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
