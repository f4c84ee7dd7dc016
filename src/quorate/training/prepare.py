"""Preparation: a plan, a state tried on a shard and restored, and a loop over updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from quorate.coordination.run_event import NOTE, RunEvent, as_note
from quorate.data.row_sample import row_sample
from quorate.data.source import Source
from quorate.engines import selection
from quorate.errors import CompileError, CopyError, UserError
from quorate.machine.memory_fraction import free_cache
from quorate.replica.deterministic import repeatable
from quorate.training import resume
from quorate.training.collective.follow import follow
from quorate.training.collective.lead import leading
from quorate.training.crew import Crew
from quorate.training.duration import Duration
from quorate.training.earlier_fits import begin_fit, end_earlier_fit
from quorate.training.loop import Loop, looping
from quorate.training.notices import is_new, once
from quorate.training.observer import refuse_ranks
from quorate.training.opening import opening, whence
from quorate.training.optimizing.cores import intra_op_threads
from quorate.training.prepared import Prepared, Taken, planned, taken
from quorate.training.probing.ahead import look_ahead
from quorate.training.probing.mistakes import look_for_mistakes
from quorate.training.probing.probe import probed
from quorate.training.state import State
from quorate.training.stop import Stops

__all__ = ["Prepared", "evaluable", "planned", "prepare", "refuse_half_an_update", "taken"]

Say = Callable[[str], None]


def evaluable(crew: Crew, prepared: Prepared, source: Source, say: Say) -> State:
    """Return the state for an evaluation; before any training, the state of the run directory."""
    if prepared.state is None:
        state, path = _probed(crew, source, say, training=False), crew.recipe.run_dir.path
        newest = None
        if prepared.put_loaded is not None:
            prepared.put_loaded(state)
        elif path is not None and not prepared.is_fresh:
            newest = resume.go_to_newest(Path(path), state, {}, say)
            if newest is not None:
                prepared.course = resume.course_of(newest.record)
                prepared.saved_shards = int(newest.record["shards"])
                evaluating = f"evaluating step {state.global_step:,} from {newest.path}"
                say(RunEvent(evaluating, NOTE))
        crew.replicas.choose_kernels(state.model, resume.kernels_of(newest))
        prepared.state = state
    return prepared.state


def refuse_half_an_update(state: State) -> None:
    """Refuse a state whose last update was interrupted.

    Raises:
        UserError: the update was interrupted.
    """
    if state.update.under_way:
        raise UserError(
            f"update {state.global_step + 1} was interrupted, and only a part of the parameters "
            "is updated",
            fix="make a new Trainer, which resumes from run_dir",
        )


@contextmanager
def prepare(
    crew: Crew,
    prepared: Prepared,
    data: Taken,
    duration: Duration,
    *,
    stops: Stops,
    say: Say,
    look: Callable[[State, Source], None] = lambda *_: None,
    at: Say = lambda _: None,
) -> Iterator[Loop]:
    """Prepare a training loop, and end its workers afterwards.

    Args:
        look: looks at the state and its training data before there are workers, if there are
            updates to make.
        at: receives the name of each phase that may take long, when the phase begins.

    Raises:
        UserError: something cannot work; no worker was started.
    """
    recipe, dataset = crew.recipe, data.dataset
    if crew.follows:
        # Threads as on rank 0. With more threads, OpenMP's threads spin between two operations of
        # an exchange on cores where other ranks compute; if such a thread loses its core, all ranks
        # wait. Computing is repeatable from the first shard on: ranks compare the bits.
        computing = repeatable(crew.replicas.computing, crew.devices)
        with intra_op_threads(recipe.workers.threads), computing:
            follow(crew, dataset, partial(_probed, crew, note=lambda _: None, training=True))
    with ExitStack() as stack:
        # 1. The run directory, locked from here on; the plan.
        stack.enter_context(prepared.lock.held(say))
        if recipe.run_dir.path is not None:
            prepared.begin(Path(recipe.run_dir.path), say)
        at("checking the newest checkpoint")
        plan = planned(crew, prepared, data)
        prepared.plan, prepared.shards = plan, plan.shards
        last_step = duration.last_step(plan)
        plan.course = replace(plan.course, last_step=last_step)
        stack.enter_context(intra_op_threads(recipe.workers.threads))
        source = Source(dataset, plan, recipe.loading.collate, recipe.loading.augment)
        notes = stack.enter_context(repeatable(crew.replicas.computing, crew.devices))
        stack.enter_context(crew.starting())
        # 2. The state, tried on one shard and restored.
        if crew.rank_group is not None:
            refuse_ranks()
            stack.callback(crew.rank_group.leave)
            at("starting the other ranks: each runs the script up to its training loop")
            crew.start_ranks()
            crew.rank_group.meet(crew.master_device, crew.timeout_s)
        is_first = not prepared.was_trained
        reports: list[str] = []  # of this fit alone; notes are shown once for all fits
        state = _trainable_state(crew, prepared, source, notes, reports, say, at)
        if not is_first:
            begin_fit(prepared)
            _compare_rows(crew, prepared, state, source, last_step)
        crew.replicas.look_at_rows(state.model, dataset, recipe.loading)
        is_cut = crew.replicas.are_in_stages
        at("cutting the model into stages" if is_cut else "trying the smallest shard of an epoch")
        left = range(state.global_step, last_step)
        notes += look_ahead(crew.replicas, state, crew.probe_replica, source, left)
        # 3. The lines before the first update.
        origin = ""
        if recipe.shards is None:
            least = crew.least_workers if state.global_step == 0 else None
            origin = whence(plan, least, crew.rule)
        first = opening(
            plan,
            crew.groups,
            crew.master_device,
            state.model,
            least_workers=crew.least_workers,
            threads=recipe.workers.threads,
            engine=crew.engine,
            rule=crew.rule,
            computing=crew.replicas.computing,
            memory_fraction=crew.memory_fraction,
            whence=origin if is_new(origin) else "",
        )
        if crew.why is not None:
            first.append(crew.why)
        if crew.rank_group is not None:
            first.append(crew.rank_group.bound)
        say(as_note(first.pop(0)))
        for line in (*first, *crew.taken, *notes):
            once(say)(as_note(line))
        for line in reports:
            say(as_note(line))
        crew.replicas.tell(say)
        loop = Loop(state, plan, last_step, prepared.saved, None, iter(()))
        if state.global_step >= last_step:
            run_dir = None if recipe.run_dir.path is None else Path(recipe.run_dir.path)
            end_earlier_fit(prepared, state, run_dir, last_step, say)
            state.leave_ranks()
            yield loop
            return
        if stops.reason is not None:  # workers take seconds to start
            say(RunEvent(f"stopped after step {state.global_step:,}: {stops.reason}", NOTE))
            state.leave_ranks()
            yield loop
            return
        at("computing a shard once more, for the graph of the model and the names of metrics")
        look(state, source)
        # 4. The workers, and the updates.
        facts = prepared.facts(crew, state)
        begun = leading if crew.rank_group is not None else partial(looping, facts=facts)
        yield stack.enter_context(begun(loop, crew, source, stops=stops, say=say))


def _trainable_state(
    crew: Crew,
    prepared: Prepared,
    source: Source,
    notes: list[str],
    reports: list[str],
    say: Say,
    at: Say,
) -> State:
    """Return the state; at first use the state is made, tried on one shard, and restored.

    Args:
        notes: receives notes about the model and the settings.
        reports: receives lines about the checkpoint.
    """
    if prepared.state is None or not prepared.was_trained:
        if prepared.state is not None:
            prepared.state.user_changes.undo()  # those of the run directory are loaded again
        # A new state, if the former was only evaluated, or did not fit its checkpoint.
        prepared.was_trained, prepared.state = False, None
        at("loading a first shard and computing it, to check the model and the loss function")
        state = _probed(crew, source, notes.append, training=True, announce=once(say))
        if crew.has_processes:
            free_cache(crew.devices)
        was = _restore(crew, prepared, state, source, reports.append, at)
        at("timing the kernels of matrix products")
        notes += crew.replicas.choose_kernels(state.model, was)
        if (now := crew.replicas.computing.kernels) != (was or now):
            since = f"since step {state.global_step:,}"
            crew.replicas.notes.doubt(f"kernels was {was} and is {now} {since}")
        at("computing parts of a shard, to find likely mistakes in the loss function")
        look_for_mistakes(crew, state, source)
        prepared.was_trained, prepared.state = True, state
    refuse_half_an_update(prepared.state)
    return prepared.state


def _compare_rows(
    crew: Crew, prepared: Prepared, state: State, source: Source, last_step: int
) -> None:
    """Sample the rows of a later fit; compare them if the fit was interrupted.

    Raises:
        MisfitError: the interrupted fit had different rows.
    """
    path, plan = crew.recipe.run_dir.path, source.plan
    if path is None:
        return
    prepared.row_sample = row_sample(source.dataset, plan.rows, plan.seed)
    was, n = prepared.resumed, state.global_step
    if was is None or n >= last_step:
        return
    prepared.resumed = None
    facts = prepared.facts(crew, state)
    resume.require_same_run(Path(path), was, facts)
    for difference in resume.differences(was, facts):
        crew.replicas.notes.doubt(f"{difference} since step {n:,}")


def _probed(
    crew: Crew, source: Source, note: Say, *, training: bool, announce: Say | None = None
) -> State:
    crew.bound_memory()
    recipe = crew.recipe
    if crew.replicas.computing.compile:
        announce = announce or note
        announce("compiling: the first shard of each shape takes seconds to minutes longer")
    while True:
        has_towers = crew.engine == selection.TOWERS
        make_state = partial(
            State,
            crew.model,
            crew.master_device,
            shared=crew.shares_parameters,
            optimize=recipe.optimize,
            loss=recipe.loss,
            notes=crew.replicas.notes,
            exchanging=None if crew.rank_group is None else crew.rank_group.exchanging,
            served=recipe.workers.servers is not None,
            parts=crew.parts,
        )
        try:
            return probed(
                crew.model,
                make_state,
                crew.probe_replica,
                source.load((0, 0)),
                partial(source.load, (0, 1) if source.plan.shards_of(0) > 1 else (1, 0)),
                loss=recipe.loss,
                notes=crew.replicas.notes,
                plan=source.plan,
                training=training,
                watching=partial(crew.replicas.watching, towers=has_towers),
                contents=crew.replicas.contents,
                say=note,
            )
        except CopyError as error:
            if not has_towers:
                raise
            crew.give_up_towers(error.reason)
        except CompileError as error:
            note(f"compile is off: {error.why}")
            crew.replicas.give_up_compiling()


def _restore(
    crew: Crew, prepared: Prepared, state: State, source: Source, say: Say, at: Say
) -> str | None:
    """Load the newest checkpoint into the state, if there is one.

    Returns:
        The kernels of matrix products in the resumed run; None: the run begins.
    """
    run_dir, notes, plan = crew.recipe.run_dir, crew.replicas.notes, source.plan
    if run_dir.path is None:
        return None
    at("loading a few rows twice, to recognise the dataset when the run is resumed")
    prepared.row_sample = row_sample(source.dataset, plan.rows, plan.seed)
    prepared.resumed = None
    facts = prepared.facts(crew, state)
    at("loading the newest checkpoint")
    path, per_epoch = Path(run_dir.path), plan.steps_per_epoch
    newest = resume.restore(path, state, facts, per_epoch, say, notes.doubt)
    if newest is not None:
        notes.remember(resume.doubts_of(newest.record))
        prepared.saved = (state.global_step, newest.path)
        if plan.course.last_step < state.global_step < newest.record.get("last_step", 0):
            prepared.resumed = newest.record  # a later fit goes on from this record
        if prepared.put_loaded is not None:
            say("the loaded weights are not used: the run resumes with the checkpoint's weights")
        if run_dir.init_from is not None:
            say(
                f"init_from={str(run_dir.init_from)!r} is not used: the run resumes with the "
                "checkpoint's weights"
            )
    return resume.kernels_of(newest)
