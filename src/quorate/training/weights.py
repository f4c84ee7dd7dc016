"""Weights of a trainer: copied, restored, and loaded from a checkpoint of its run or any file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quorate.errors import CheckpointError, SettingError, UserError
from quorate.machine.regular_file import exists, is_folder
from quorate.services.checkpoints import files
from quorate.services.checkpoints.weights import load_weights
from quorate.training.saved_state import WeightCopies, take_weights, weights, weights_in
from quorate.training.state import State

if TYPE_CHECKING:
    from quorate.training.setup import TrainingSetup

__all__ = ["copy_weights", "give_weights", "load", "load_weights", "restore_weights"]

Say = Callable[[str], None]
BEST, NEWEST = "best", "newest"


def copy_weights(state: State | None) -> dict[str, torch.Tensor]:
    """Return a copy of all weights and buffers: "model/NAME", "averaged/NAME", "rest/NAME".

    Raises:
        UserError: nothing was trained or evaluated yet.
    """
    parts = weights(_there(state))._asdict()
    return {f"{part}/{name}": value for part, kept in parts.items() for name, value in kept.items()}


def restore_weights(copies: dict[str, torch.Tensor], state: State | None) -> None:
    """Load copies made by ``copy_weights`` into a state.

    Raises:
        UserError: the copies are of another model, or nothing was trained or evaluated yet.
    """
    state = _there(state)
    own = copy_weights(state)
    for name in sorted(own.keys() | copies.keys()):
        mine, other = own.get(name), copies.get(name)
        if mine is None or other is None or (mine.shape, mine.dtype) != (other.shape, other.dtype):
            raise UserError(
                "weights",
                f"{name} differs from what weights() returned",
                fix="put back what weights() returned",
            )
    parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in WeightCopies._fields}
    for name, value in copies.items():
        part, _, inner = name.partition("/")
        parts[part][inner] = value
    take_weights(WeightCopies(**parts), state)


def load(which: str | Path, setup: TrainingSetup) -> Path:
    """Load a checkpoint's weights, plain and averaged, and return the path of the weights.

    Args:
        which: "best" or "newest" of the run directory; or a checkpoint's folder, a run directory,
            or a file of weights.

    Raises:
        CheckpointError: there is no such checkpoint, or the checkpoint is damaged or of another
            model.
        SettingError: there is no run directory.
    """
    say = setup.say
    path = _found(setup.run_dir, str(which), say) if which in (BEST, NEWEST) else Path(which)
    if (state := setup.state) is None:
        load_weights(setup.workers.model_as_given, path, say)
        # The state is made later, and has averaged weights too.
        setup.apply_loaded_weights = partial(give_weights, path, say)
    else:
        give_weights(path, say, state)
    say(f"loaded the weights from {path}")
    return path


def give_weights(path: Path, say: Say, state: State) -> None:
    """Load the weights of a path into a state, with averaged weights if the path has any."""
    if is_folder(path):
        if not exists(path / files.MARKER):
            sound = files.find(path)
            if sound is None:
                raise CheckpointError(f"weights of {path}", "there is no checkpoint in it")
            path = sound.path
        saved, _ = weights_in(path, files.check_named(path), state)
        take_weights(saved, state)
        return
    load_weights(state.model, path, say)
    if state.average is not None:
        state.average.shadow.copy_(state.parameters)


def _found(run_dir: Path | None, which: str, say: Say) -> Path:
    if run_dir is None:
        raise SettingError("load", which, "a path, as there is no run_dir", "set it in Trainer")
    newest = files.find(run_dir)
    if newest is None:
        raise CheckpointError("load", f"there is no checkpoint in {run_dir}", fix="train first")
    for wrong in newest.passed_over:
        say(f"skipped a checkpoint: {wrong}")
    if which == NEWEST:
        return newest.path
    best = newest.record["account"]["best"]
    if best is None:
        raise CheckpointError(
            "load",
            f"no checkpoint in {run_dir} was saved as the best",
            fix="train with Validation(best='min:loss'), for example",
        )
    path = files.checkpoint_of(run_dir, best["global_step"])
    files.check(path, best["global_step"])
    return path


def _there(state: State | None) -> State:
    if state is None:
        raise UserError(
            "weights", "there are no trained weights yet", fix="train or evaluate first"
        )
    return state
