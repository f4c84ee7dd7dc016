"""A state for evaluation, and the choice of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from quorate.data.source import Source
from quorate.errors import SettingError
from quorate.replica.deterministic import repeatable
from quorate.replica.flat import Flat
from quorate.training.optimizing.cores import intra_op_threads
from quorate.training.prepare import evaluable
from quorate.training.setup import TrainingSetup
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup


class Evaluated(NamedTuple):
    """A state, and the parameters to evaluate."""

    state: State
    parameters: Flat


@contextmanager
def evaluable_state(
    workers: WorkerGroup,
    setup: TrainingSetup,
    source: Source,
    averaged: bool | None,
    say: Callable[[str], None],
) -> Iterator[Evaluated]:
    """Prepare a state for workers to evaluate inside the block: its plain or averaged weights.

    Raises:
        SettingError: there are no averaged weights.
    """
    workers.note_use()
    with ExitStack() as stack:
        stack.enter_context(intra_op_threads(workers.config.workers.threads))
        stack.enter_context(repeatable(workers.replicas.computing, workers.devices))
        plan = source.plan
        plan.course = setup.course_between(0)
        state = evaluable(workers, setup, source, say)
        plan.course = setup.course_between(state.global_step)
        state.model_edits.detect()
        parameters = state.parameters
        if averaged or (averaged is None and state.average is not None):
            if state.average is None:
                expected = "Optimize(ema_decay=)"
                raise SettingError("averaged", averaged, expected, "set it in Trainer")
            parameters = state.average.shadow
        if parameters is state.parameters:
            stack.enter_context(state.optimizer.evaluating())
        yield Evaluated(state, parameters)
    state.model_edits.set_baseline()
    workers.replicas.tell(say)
