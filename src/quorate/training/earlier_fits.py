"""Earlier fits of a restarted script: each fit ends after a total number of updates of the run.

The run directory has the newest state and a few older states. A fit that ended before the restart
is not repeated. Between two fits, the script may use the model as the earlier fit left it, for
example for rollouts. So after an earlier fit the model has the weights of that time, if a
checkpoint has them, until the next fit begins.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quorate.errors import CheckpointError
from quorate.services.checkpoints import files
from quorate.training.ending.weights import copied, give_weights, put_back
from quorate.training.serving.served_optimizer import ServedOptimizer
from quorate.training.setup import TrainingSetup
from quorate.training.state import State


def end_earlier_fit(
    setup: TrainingSetup,
    state: State,
    run_dir: Path | None,
    last_step: int,
    say: Callable[[str], None],
) -> None:
    """End a fit without updates to make: all were made before the script was restarted.

    Args:
        state: the state after the newest update of the run.
        run_dir: the directory of the run, if the run is saved.
        last_step: number of updates after which the fit ends.
    """
    n = state.global_step
    if n == last_step:
        say(f"nothing to do: {n:,} of {last_step:,} updates are done")
        return
    line = f"nothing to do: this fit ends after update {last_step:,}, and the run has made {n:,}"
    if run_dir is None or isinstance(state.optimizer, ServedOptimizer):
        say(line)
        return
    path = files.checkpoint_of(run_dir, last_step)
    try:
        files.check(path, last_step)
        newest = copied(state)
        give_weights(path, lambda _: None, state)
    except CheckpointError:  # usually: there is no such checkpoint
        say(
            f"{line}; the model has the weights of update {n:,}, because no checkpoint of update "
            f"{last_step:,} is left, so code between two fits (rollouts) computes different "
            "results; keep more checkpoints with RunDir(keep=)"
        )
        return
    setup.newest_weights = newest
    say(f"{line}; until the next fit the model has the weights of update {last_step:,}")


def begin_fit(setup: TrainingSetup) -> None:
    """Restore the newest weights of the state, set aside by an earlier fit."""
    newest, setup.newest_weights = setup.newest_weights, None
    if newest is not None:
        put_back(newest, setup.state)
