"""Preparing: a plan, a state that was tried on one shard and restored, and a loop over updates.

A plan follows from the recipe, the workers and a number of rows: asking for one changes nothing.
Only a training loop pins the number of shards, where the recipe leaves it open.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quorate.coordination.plan import Plan, PlanByShard
from quorate.data.loader_processes import require_loader_memory
from quorate.data.source import Source, length
from quorate.errors import CompileError, SettingError, UserError
from quorate.machine.memory_fraction import free_cache
from quorate.replica.deterministic import repeatable
from quorate.services.checkpoints import files
from quorate.training import resume, saved_state
from quorate.training.crew import Crew
from quorate.training.duration import Duration
from quorate.training.loop import Loop, looping
from quorate.training.opening import opening
from quorate.training.optimizing.update import intra_op_threads
from quorate.training.probe import probed
from quorate.training.recipe import too_many_shards
from quorate.training.state import State
from quorate.training.stop import Stops
from quorate.transports import engines

Say = Callable[[str], None]


@dataclass
class Prepared:
    """What a trainer has made ready, from its construction on."""

    shards: int | None  # V; None as long as no loop was begun, and the recipe has none
    is_fresh: bool  # what is in the run directory is still to be moved aside
    state: State | None = None
    was_trained: bool = False  # the state was tried on a training shard, and restored
    plan: Plan | None = None  # of the last loop
    saved: tuple[int, Path] | None = None  # the newest checkpoint: its step and directory


def planned(crew: Crew, prepared: Prepared, dataset: Any, *, shuffle: bool) -> Plan:
    """Return the plan of a training loop over a dataset; changes nothing.

    Raises:
        DataError: it is no map-style dataset, or is empty.
        SettingError: there are fewer rows than shards, or fewer shards than the rule needs.
    """
    recipe, rule, rows = crew.recipe, crew.rule, length(dataset)
    shards = prepared.shards
    if shards is None:
        newest = newest_checkpoint(crew, prepared)
        workers = min(len(crew.groups), recipe.batch_size, rows)
        shards = workers if newest is None else int(newest.record["shards"])
    if shards > rows:
        raise too_many_shards(shards, f"{rows} rows of the dataset")
    if shards < rule.least_shards:
        expected = f"at most the {shards} shards of a batch"
        raise SettingError("update", rule.name, expected, "choose a smaller quorum, or more shards")
    kind = PlanByShard if rule.by_shard else Plan
    return kind(
        rows=rows,
        batch_size=min(recipe.batch_size, rows),
        shards=shards,
        seed=recipe.seed,
        shuffle=shuffle,
        order=recipe.loading.order,
    )


def newest_checkpoint(crew: Crew, prepared: Prepared) -> files.Sound | None:
    """Return the checkpoint to go on from."""
    path = crew.recipe.run_dir.path
    return None if path is None or prepared.is_fresh else files.find(Path(path))


def evaluable(crew: Crew, prepared: Prepared, source: Source, say: Say) -> State:
    """Return a state to evaluate: before any training that of the run directory, if it has one."""
    if prepared.state is None:
        prepared.state = _probed(crew, source, say, training=False)
        newest = newest_checkpoint(crew, prepared)
        if newest is not None:
            saved_state.load(newest.path, newest.record, prepared.state)
            say(f"evaluating step {prepared.state.global_step:,} from {newest.path}")
    return prepared.state


def facts_of(crew: Crew, state: State, plan: Plan) -> dict[str, Any]:
    """Return what a checkpoint says beside what it holds."""
    scheduler = state.update.scheduler
    return {
        "epoch": state.global_step // plan.steps_per_epoch,
        **crew.recipe.facts(),
        # What was found out, and is no setting, or not as it was set.
        "shards": plan.shards,
        "rows": plan.rows,
        "shuffle": plan.shuffle,
        "compile": crew.replicas.computing.compile,
        "schedule": None if scheduler is None else type(scheduler).__name__,
        "engine": crew.engine,
        "devices": sorted({str(group) for group in crew.groups}),
        "device_types": sorted({device.type for device in crew.devices}),
        "workers": len(crew.groups),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "account": state.account(),
        "doubts": crew.replicas.notes.doubts,
    }


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
        state = _trainable_state(crew, prepared, source, plan, notes.append, say)
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
        for line in (*first, *notes, *map(str, crew.replicas.notes.take())):
            say(line)
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
        facts = facts_of(crew, state, plan)
        yield stack.enter_context(looping(loop, crew, source, facts, stops, say))


def _trainable_state(
    crew: Crew, prepared: Prepared, source: Source, plan: Plan, note: Say, say: Say
) -> State:
    """Return the state; on first use it is made, tried on one shard, and restored."""
    if prepared.state is None or not prepared.was_trained:
        if prepared.state is not None:
            prepared.state.user_changes.undo()  # those of the run directory: they come again
        prepared.state = state = _probed(crew, source, note, training=True, announce=say)
        prepared.was_trained = True
        if crew.engine == engines.PROCESSES:
            free_cache(crew.devices)
        _restore(crew, prepared, state, plan, note)
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
        notes=crew.replicas.notes,
    )
    while True:
        try:
            return probed(
                crew.model,
                make_state,
                crew.probe_replica,
                source.load((0, 0)),
                seed=recipe.seed,
                training=training,
                say=note,
            )
        except CompileError as error:
            note(f"compile is off: {error.why}")
            crew.replicas.give_up_compiling()


def _restore(crew: Crew, prepared: Prepared, state: State, plan: Plan, say: Say) -> None:
    run_dir = crew.recipe.run_dir
    if run_dir.path is None:
        return
    facts = facts_of(crew, state, plan)
    newest = resume.restore(Path(run_dir.path), state, facts, plan.steps_per_epoch, say)
    if newest is not None:
        crew.replicas.notes.remember(newest.record.get("doubts", []))
        prepared.saved = (state.global_step, newest.path)
        if run_dir.init_from is not None:
            say(f"init_from={str(run_dir.init_from)!r} is of no use: the run has its own weights")
