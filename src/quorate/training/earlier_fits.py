"""Fits of a script that is started again: each ends after an update of the run, counted in all.

The run directory has the newest state alone, and some older ones. A fit that ended earlier is not
made again. What the script does between two fits may depend on the model as the earlier fit left
it: rollouts are made with it, say. So after a fit that ended earlier the model has the weights of
that time, if a checkpoint has them, until the next fit begins.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quorate.errors import CheckpointError
from quorate.services.checkpoints import files
from quorate.training.ending.weights import copied, give_weights, put_back
from quorate.training.prepared import Prepared
from quorate.training.state import State


def end_earlier_fit(
    prepared: Prepared,
    state: State,
    run_dir: Path | None,
    last_step: int,
    say: Callable[[str], None],
) -> None:
    """End a fit that has no update to make: all were made when the script ran before.

    Args:
        state: after the newest update of the run.
        run_dir: of the run, if it is saved.
        last_step: updates after which the fit ends.
    """
    n = state.global_step
    if n == last_step:
        say(f"nothing to do: {n:,} of {last_step:,} updates are done")
        return
    line = f"nothing to do: this fit ends after update {last_step:,}, and the run has made {n:,}"
    if run_dir is None or state.serving is not None:
        say(line)
        return
    path = files.checkpoint_of(run_dir, last_step)
    try:
        files.check(path, last_step)
        newest = copied(state)
        give_weights(path, lambda _: None, state)
    except CheckpointError:  # mostly: there is none
        say(
            f"{line}; the model has the weights of update {n:,}, because no checkpoint of update "
            f"{last_step:,} is left, so code between two fits (rollouts) computes different "
            "results; keep more checkpoints with RunDir(keep=)"
        )
        return
    prepared.newest_weights = newest
    say(f"{line}; until the next fit the model has the weights of update {last_step:,}")


def begin_fit(prepared: Prepared) -> None:
    """Give the state its newest weights back, which a fit that ended earlier has put aside."""
    newest, prepared.newest_weights = prepared.newest_weights, None
    if newest is not None:
        put_back(newest, prepared.state)
