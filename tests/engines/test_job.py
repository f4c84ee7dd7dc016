"""Jobs: how a worker process finds the class of its work."""

import pytest

from quorate.engines.job import Evaluation, Job, Training, class_name, class_of


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "quorated.job:Training",
        "quorate.engines.job:Task",
        "quorate.engines.job:Nobody",
        "quorate.engines.job",
    ],
)
def test_only_a_job_of_quorates_is_followed_by_its_name(name: str) -> None:
    for kind in (Training, Evaluation):
        assert class_of(class_name(kind), Job) is kind
    with pytest.raises(ValueError, match=f"got '{name}', expected a subclass of Job of quorate"):
        class_of(name, Job)
