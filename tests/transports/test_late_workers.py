"""A worker that comes late, or in another's place, is compared with the coordinator as all are."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import References
from support.runs import Ended, command, inspected, last_json, run

pytestmark = pytest.mark.slow


def late(folder: Path, who: str, how: str) -> Ended:
    options = ("--workers", "2", "--run-dir", str(folder / "run"))
    return run(command("late.py", who, how, str(folder), options=options))


@pytest.mark.parametrize(
    ("who", "how"), [("late", "same"), ("replaced", "same"), ("replaced", "amended")]
)
def test_one_that_is_the_same_changes_nothing(
    who: str, how: str, tmp_path: Path, references: References
) -> None:
    ended = late(tmp_path, who, how)
    assert ended.code == 0, ended.said
    expected = references.on_a_tower("late.py", "never", how, "/").json["digest"]
    assert last_json(ended.out)["digest"] == expected


@pytest.mark.parametrize("who", ["late", "replaced"])
def test_one_with_another_model_ends_the_run_and_what_was_trained_is_saved(
    who: str, tmp_path: Path
) -> None:
    ended = late(tmp_path, who, "other")
    assert ended.code == 2, ended.said
    (line,) = ended.err.splitlines()
    assert "computes another gradient from the same rows and parameters: its model" in line
    assert 3 <= inspected(tmp_path / "run")["global_step"] <= 200


def test_what_one_alone_raises_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    ended = late(tmp_path, "late", "raises")
    assert ended.code == 1, ended.said
    assert "ZeroDivisionError: in the late one alone" in ended.err
    assert "quorate: worker 1, in the shard that it is compared by: step 0, shard 0" in ended.err
    assert 3 <= inspected(tmp_path / "run")["global_step"] <= 200
