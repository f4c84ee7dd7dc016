"""Former checkpoints stay loadable, and a resumed run reaches the same bits."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.runs import digests, inspected, on_a_tower
from support.trainings import checkpoints, golden
from support.trainings.checkpoints import CHECKPOINTS, FOLDER, resume
from support.trainings.trees import CURRENT, NoBaseError, Tree, base_tree

FORMER = Path(__file__).parent / "data" / "before-rooms"
SAMPLE = ("callbacks",)


def require_resumed(names: list[str], folder: Path) -> None:
    """Go on from checkpoints of the base commit as the base commit does.

    On an unknown kind of processor the expectation comes from the base commit, or from one worker.
    """
    with ExitStack() as stack:
        current = stack.enter_context(Tree(CURRENT))
        found = {name: resume(current, name, folder / name) for name in names}
        expected = golden.recorded(checkpoints.digests_file())
        if expected is None:
            try:
                tree, engine = stack.enter_context(base_tree()), "inline"
            except NoBaseError:
                tree, engine = current, "towers:3"
            expected = {
                name: resume(tree, name, folder / f"{name} again", engine).facts for name in names
            }
    for name, result in found.items():
        at = CHECKPOINTS[name].at
        assert f"resumed step {at} (epoch {at // 5 + 1}, " in result.resumed, name
        assert result.facts == expected[name], name
        assert result.facts["global_step"] == checkpoints.STEPS


def test_a_checkpoint_of_the_base_commit_is_resumed(tmp_path: Path) -> None:
    require_resumed([*SAMPLE], tmp_path)


@pytest.mark.slow
def test_all_checkpoints_of_the_base_commit_are_resumed(tmp_path: Path) -> None:
    require_resumed([name for name in CHECKPOINTS if name not in SAMPLE], tmp_path)


def test_all_checkpoints_are_stored_and_are_sound() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*CHECKPOINTS, "digests"}
    for file in (FOLDER / "digests").iterdir():
        assert json.loads(file.read_text())["results"].keys() == CHECKPOINTS.keys()
    for name, configuration in CHECKPOINTS.items():
        [listed] = inspected(FOLDER / name)["checkpoints"]
        assert (listed["global_step"], listed["is_sound"]) == (configuration.at, True), name


def test_a_checkpoint_without_rooms_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resume a checkpoint of a version long before the base commit."""
    for workers in ("1", "3"):
        run_dir = str(shutil.copytree(FORMER, tmp_path / workers))
        on_a_tower(
            "everything.py", options=("--shards", "4", "--run-dir", run_dir, "--workers", workers)
        )
        assert "resumed step 10 (epoch 3, 0%)" in capsys.readouterr().out
    assert digests(tmp_path / "1") == digests(tmp_path / "3")
