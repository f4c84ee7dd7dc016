"""The update of a step from the sums of its shards, on every engine.

A loss over the whole batch, terms of a loss with totals of their own, and an optimizer with a
closure need the shards of the step once more: see ``second_pass.py``. An engine supplies the sums
and the second passes; the coordinator's process makes the update, or all ranks in lockstep.
"""

from __future__ import annotations

from functools import partial

from quorate.data.source import Source
from quorate.engines.seeded_draws import seeded_draws
from quorate.training.drive import ReadyStep
from quorate.training.optimizing.update import UpdateResult
from quorate.training.second_pass import (
    SecondPass,
    UpdateWithTerms,
    gradient_again,
    receives_closure,
    refuse_totals,
)
from quorate.training.state import State
from quorate.training.whole_batch.whole_batch import BatchLoss, UpdateOfWholeBatch
from quorate.training.worker_group import WorkerGroup


class StepUpdate:
    """Makes the updates of a loop.

    Args:
        workers: the workers of the trainer.
        state: the state to update.
        source: the rows of each shard.
        second_pass: computes the shards of a step again.
        batch_loss: computes the loss over a whole batch; None without such a loss.

    Raises:
        SettingError: the optimizer needs a closure, but under the rule workers go on while the
            optimizer steps.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        state: State,
        source: Source,
        second_pass: SecondPass,
        batch_loss: BatchLoss | None,
    ) -> None:
        self._state, self._plan, self._second_pass = state, source.plan, second_pass
        self._finish: UpdateOfWholeBatch | UpdateWithTerms
        if batch_loss is None:
            refuse = partial(refuse_totals, workers.rule, workers.config.workers.servers)
            shards_of = self._plan.shards_of
            self._finish = UpdateWithTerms(second_pass, state.optimizer, shards_of, refuse)
        else:
            self._finish = UpdateOfWholeBatch(self._plan, batch_loss, second_pass)
        gets_closure = receives_closure(state.optimizer, workers.rule)
        if state.optimizer.takes_closure and not gets_closure:
            workers.replicas.notes.add(
                f"{state.phases.kind}.step() accepts a closure and receives none under "
                f"{workers.rule.name}, because workers compute while the optimizer steps"
            )
        self._gives_closure = gets_closure and batch_loss is None

    def __call__(self, ready: ReadyStep) -> UpdateResult:
        """Make the update of a step. Blocks.

        Raises:
            NotFiniteError: a gradient in a closure is not finite.
            Exception: the error of user code in a shard that failed on all attempts.
        """
        state, plan, step = self._state, self._plan, ready.step
        shards = plan.shards_of(step)
        state.begin_phase(plan.phase(step))
        again = None
        if self._gives_closure:
            again = partial(gradient_again, self._second_pass, step, shards)
        present = len(ready.shards)
        update = partial(state.update.apply, shards=shards, present=present, recompute=again)
        with seeded_draws("update", plan, state.global_step + 1):
            return self._finish(ready, update)
