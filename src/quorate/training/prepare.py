"""Preparing: a plan, a state that was tried on one shard and restored, and a loop over updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quorate.data.loader_processes import require_loader_memory
from quorate.data.row_sample import row_sample
from quorate.data.source import Source
from quorate.errors import CompileError, UserError
from quorate.machine.memory_fraction import free_cache
from quorate.replica.deterministic import repeatable
from quorate.training import resume, saved_state
from quorate.training.crew import Crew
from quorate.training.duration import Duration
from quorate.training.loop import Loop, looping
from quorate.training.opening import opening
from quorate.training.optimizing.update import intra_op_threads
from quorate.training.prepared import Prepared, newest_checkpoint, planned
from quorate.training.probe import probed
from quorate.training.state import State
from quorate.training.stop import Stops
from quorate.transports import engines

__all__ = ["Prepared", "evaluable", "planned", "prepare", "refuse_half_an_update"]

Say = Callable[[str], None]


def evaluable(crew: Crew, prepared: Prepared, source: Source, say: Say) -> State:
    """Return a state to evaluate: before any training that of the run directory, if it has one."""
    if prepared.state is None:
        prepared.state = _probed(crew, source, say, training=False)
        newest = newest_checkpoint(crew, prepared)
        if newest is not None:
            saved_state.load(newest.path, newest.record, prepared.state)
            say(f"evaluating step {prepared.state.global_step:,} from {newest.path}")
    return prepared.state


def refuse_half_an_update(state: State) -> None:
    """Refuse a state that an update was cut off in.

    Raises:
        UserError: it was.
    """
    if state.update.under_way:
        raise UserError(
            f"update {state.global_step + 1} was cut off, and the parameters are half of it; "
            "make a new Trainer, which resumes from run_dir"
        )


@contextmanager
def prepare(
    crew: Crew,
    prepared: Prepared,
    dataset: Any,
    duration: Duration,
    *,
    shuffle: bool,
    stops: Stops,
    say: Say,
) -> Iterator[Loop]:
    """Prepare a training loop, and end its workers afterwards.

    Raises:
        UserError: something cannot work; no worker was started.
    """
    recipe = crew.recipe
    # 1. The plan; what an earlier run left in the directory is moved aside first, if wanted.
    if prepared.is_fresh and recipe.run_dir.path is not None:
        prepared.is_fresh = False
        if (folder := resume.set_aside(Path(recipe.run_dir.path))) is not None:
            say(f"the run that was in {recipe.run_dir.path} is in {folder} now")
    plan = planned(crew, prepared, dataset, shuffle=shuffle)
    prepared.plan, prepared.shards = plan, plan.shards
    last_step = duration.last_step(plan)
    with ExitStack() as stack:
        stack.enter_context(intra_op_threads(recipe.workers.threads))
        source = Source(dataset, plan, recipe.loading.collate, recipe.loading.augment)
        notes = stack.enter_context(repeatable(crew.replicas.computing.precision, crew.devices))
        # 2. The state, tried on one shard and restored.
        state = _trainable_state(crew, prepared, source, notes.append, say)
        if recipe.loading.processes:
            require_loader_memory(
                source.load((0, 0)).data,
                shards=plan.shards,
                loader_workers=recipe.loading.processes,
                feeds=len(crew.groups) if crew.script is not None else 1,
            )
        # 3. What is said before the first update.
        first = opening(
            plan,
            crew.groups,
            crew.master_device,
            state.model,
            threads=recipe.workers.threads,
            rule=crew.rule,
            computing=crew.replicas.computing,
            memory_fraction=crew.memory_fraction,
        )
        for line in (*first, *notes):
            say(line)
        crew.replicas.tell(say)
        loop = Loop(state, plan, last_step, prepared.saved, None, iter(()))
        if state.global_step >= last_step:
            say(f"nothing to do: {state.global_step:,} of {last_step:,} updates are done")
            yield loop
            return
        if stops.reason is not None:  # workers take seconds to start
            say(f"stopped after step {state.global_step:,}: {stops.reason}")
            yield loop
            return
        # 4. The workers, and the updates.
        facts = prepared.facts(crew, state)
        yield stack.enter_context(looping(loop, crew, source, facts, stops, say))


def _trainable_state(crew: Crew, prepared: Prepared, source: Source, note: Say, say: Say) -> State:
    """Return the state; on first use it is made, tried on one shard, and restored."""
    if prepared.state is None or not prepared.was_trained:
        prepared.state = state = _probed(crew, source, note, training=True, announce=say)
        prepared.was_trained = True
        if crew.engine == engines.PROCESSES:
            free_cache(crew.devices)
        _restore(crew, prepared, state, source, note)
        if crew.replicas.takes_turns:
            note(
                "the model draws from Python's random or NumPy, which threads share: workers "
                "compute in turn; with torch's random functions they compute side by side"
            )
    refuse_half_an_update(prepared.state)
    return prepared.state


def _probed(
    crew: Crew, source: Source, note: Say, *, training: bool, announce: Say | None = None
) -> State:
    crew.bound_memory()
    recipe = crew.recipe
    if crew.replicas.computing.compile:
        announce = announce or note
        announce("compiling: the first shard of each shape takes seconds to minutes longer")
    make_state = partial(
        State,
        crew.model,
        crew.master_device,
        shared=crew.engine == engines.PROCESSES,
        optimize=recipe.optimize,
    )
    while True:
        try:
            return probed(
                crew.model,
                make_state,
                crew.probe_replica,
                source.load((0, 0)),
                loss=recipe.loss,
                notes=crew.replicas.notes,
                seed=recipe.seed,
                training=training,
                say=note,
            )
        except CompileError as error:
            note(f"compile is off: {error.why}")
            crew.replicas.give_up_compiling()


def _restore(crew: Crew, prepared: Prepared, state: State, source: Source, say: Say) -> None:
    run_dir, notes, plan = crew.recipe.run_dir, crew.replicas.notes, source.plan
    if run_dir.path is None:
        return
    prepared.row_sample = row_sample(source.dataset, plan.rows, plan.seed)
    facts = prepared.facts(crew, state)
    path, per_epoch = Path(run_dir.path), plan.steps_per_epoch
    newest = resume.restore(path, state, facts, per_epoch, say, notes.doubt)
    if newest is not None:
        notes.remember(newest.record.get("doubts", []))
        prepared.saved = (state.global_step, newest.path)
        if run_dir.init_from is not None:
            say(f"init_from={str(run_dir.init_from)!r} is of no use: the run has its own weights")
