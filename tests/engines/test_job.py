"""Jobs: how a worker process finds the class of what it is to compute."""

from __future__ import annotations

import pytest

from quorate.engines.job import Evaluation, Training, class_name, class_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("os:system", "a module of quorate"),
        ("quorated.job:Training", "a module of quorate"),
        ("quorate.engines.job:Task", "a subclass of Job"),
        ("quorate.engines.job:Nobody", "a subclass of Job"),
        ("quorate.engines.job", "a subclass of Job"),
    ],
)
def test_only_a_job_of_quorates_is_followed_by_its_name(name: str, expected: str) -> None:
    for kind in (Training, Evaluation):
        assert class_of(class_name(kind.__new__(kind))) is kind
    with pytest.raises(ValueError, match=f"got '{name}', expected .*{expected}"):
        class_of(name)
