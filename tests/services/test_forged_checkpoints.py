"""Forged checkpoints: sound checksums, nonsense inside. Each is passed over, with its reason."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.forgery.forge import forge
from support.small import DATA, trainer

from quorate.commands.main import main
from quorate.errors import CheckpointError
from quorate.replica.digest import digest
from quorate.services.checkpoints import files
from quorate.training.resume import go_to_newest
from quorate.training.state import State

FORGERIES = int(os.environ.get("QUORATE_TEST_FORGERIES", "400"))
STRIDE = 17  # of the sample among them that is tried each time


class Run:
    """A run with two checkpoints, and a state that goes on from them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        saved = trainer(run_dir, save_every_steps=2, summary_every_s=None, schedule=None)
        saved.fit(DATA, steps=6)
        shutil.rmtree(files.checkpoint_of(run_dir, 2))
        self.state: State = saved._prepared.state
        self.facts: dict[str, Any] = saved._facts(self.state)
        self.at = {6: self.content()}
        shutil.move(files.checkpoint_of(run_dir, 6), run_dir / "newest")
        assert self.resumed() == []
        self.at[4] = self.content()
        shutil.move(run_dir / "newest", files.checkpoint_of(run_dir, 6))

    def resumed(self, run_dir: Path | None = None) -> list[str]:
        """Bring the state to the newest sound checkpoint; return what was said."""
        said: list[str] = []
        assert go_to_newest(run_dir or self.run_dir, self.state, self.facts, said.append)
        return said

    def content(self) -> tuple[Any, ...]:
        """Return all that training goes on from."""
        state = self.state
        assert state.average is not None
        moments = {
            f"{entry}.{name}": value
            for name, entries in state.optimizer.state().items()
            for entry, value in entries.items()
        }
        return (
            state.global_step,
            json.dumps(state.account()),
            digest(state.tensors().items()),
            digest(state.average.shadow.views.items()),
            digest(sorted(moments.items())),
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


def is_shown_safely(text: str) -> bool:
    """Whether a text is fit for a terminal."""
    return all(c.isprintable() or c == "\n" for c in text)


def look_at(number: int, run: Run, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forge a checkpoint, resume, inspect; then again without an older one to fall back to."""
    run_dir = folder / f"{number}"
    shutil.copytree(run.run_dir / "checkpoints", run_dir / "checkpoints")
    done = forge(files.checkpoint_of(run_dir, 6), number)
    what = f"forgery {number}: {done!r}"
    run.resumed()
    assert run.content() == run.at[6]
    # 1. It is passed over, with one line, for the older one.
    said = run.resumed(run_dir)
    assert run.content() == run.at[4], what
    assert len(said) == 1, what
    assert said[0].startswith(f"skipped a checkpoint: {run_dir}/checkpoints"), what
    assert is_shown_safely(said[0]), what
    assert "\n" not in said[0], what
    # 2. So it is by inspect, unless only the run can know: of its settings or its model.
    assert main(["inspect", str(run_dir)]) == 0, what
    shown = capsys.readouterr()
    assert is_shown_safely(shown.out + shown.err), what
    assert "forged" not in shown.out.replace(str(run_dir), ""), what
    # 3. Without an older one nothing is trained, and the state is as it was.
    shutil.rmtree(files.checkpoint_of(run_dir, 4))
    with pytest.raises(CheckpointError) as caught:
        run.resumed(run_dir)
    assert run.content() == run.at[4], what
    assert is_shown_safely(str(caught.value)), what
    code = main(["inspect", str(run_dir)])
    shown = capsys.readouterr()
    assert code in (0, 2), what
    assert is_shown_safely(shown.out + shown.err), what
    shutil.rmtree(run_dir)


@pytest.mark.parametrize("number", range(0, 1000, STRIDE))
def test_a_forged_checkpoint_is_passed_over(
    number: int, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    look_at(number, run, tmp_path, capsys)


@pytest.mark.slow
def test_hundreds_of_forged_checkpoints_are_passed_over(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(FORGERIES):
        look_at(number, run, tmp_path, capsys)
