"""Resuming: a run directory holds a run, and what goes on in it has to be the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quorate.errors import CheckpointError
from quorate.services.checkpoints import files
from quorate.services.checkpoints.files import Sound
from quorate.settings import AtResume
from quorate.training.recipe import OPTIONS
from quorate.training.saved_state import load
from quorate.training.state import State

# What is compared beside settings: it follows from the data and the machine.
REFUSED = ("rows", "shuffle")
SAID = ("torch", "device_types", "schedule")

# What of a run directory is ours.
OURS = ("checkpoints", "metrics.jsonl", "summaries")


def restore(
    run_dir: Path,
    state: State,
    facts: dict[str, Any],
    steps_per_epoch: int,
    say: Callable[[str], None],
) -> Sound | None:
    """Bring a state to the newest sound checkpoint; None if there is none.

    Args:
        facts: of the run that is to go on, as in its checkpoints.

    Raises:
        CheckpointError: every checkpoint is damaged, or it is one of another run.
    """
    newest = files.find(run_dir)
    if newest is None:
        return None
    for wrong in newest.passed_over:
        say(f"damaged, passed over: {wrong}")
    for name in (*_recorded(AtResume.REFUSED), *REFUSED):
        was = newest.record.get(name, False)  # is_ordered: not in those of before it existed
        if was != facts[name]:
            raise CheckpointError(
                f"{newest.path}: it was trained with {name}={was!r}, and this run has "
                f"{facts[name]!r}; use the same, choose another run_dir, or --fresh"
            )
    lines = load(newest.path, newest.record, state)
    state.load_account(newest.record["account"])
    say(f"resumed {position(state.global_step, steps_per_epoch)} from {newest.path}")
    for line in lines:
        say(line)
    for name in (*_recorded(AtResume.SAID), *SAID):
        was, now = newest.record.get(name, facts[name]), facts[name]
        if was != now:
            say(f"{name} was {was} and is {now}: bits may differ from here on")
    return newest


def _recorded(at_resume: AtResume) -> list[str]:
    return [option.recorded for option in OPTIONS.values() if option.at_resume is at_resume]


def position(global_step: int, steps_per_epoch: int) -> str:
    """``step 12,300 (epoch 3, 41%)``."""
    epoch, done = divmod(global_step, steps_per_epoch)
    return f"step {global_step:,} (epoch {epoch + 1}, {done / steps_per_epoch:.0%})"


def set_aside(run_dir: Path) -> Path | None:
    """Move what an earlier run left into a folder of its own there; None if there is nothing.

    Raises:
        OSError: it cannot be moved.
    """
    there = [path for name in OURS if (path := run_dir / name).exists()]
    if not there:
        return None
    number = 1
    while (folder := run_dir / f"aside-{number}").exists():
        number += 1
    folder.mkdir()
    for path in there:
        path.rename(folder / path.name)
    return folder
