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
from quorate.training.earlier_fits import begin_fit, end_earlier_fit
from quorate.training.loop import Loop, looping
from quorate.training.notices import is_new, once
from quorate.training.observer import refuse_ranks
from quorate.training.opening import opening, whence
from quorate.training.optimizing.cores import intra_op_threads
from quorate.training.probing.ahead import look_ahead
from quorate.training.probing.mistakes import look_for_mistakes
from quorate.training.probing.probe import probed
from quorate.training.setup import DatasetConfig, TrainingSetup, planned, read_dataset_config
from quorate.training.state import State
from quorate.training.stop import Stops
from quorate.training.stop_after import StopAfter
from quorate.training.worker_group import WorkerGroup

__all__ = [
    "TrainingSetup",
    "evaluable",
    "planned",
    "prepare",
    "read_dataset_config",
    "refuse_half_an_update",
]

Say = Callable[[str], None]


def evaluable(workers: WorkerGroup, setup: TrainingSetup, source: Source, say: Say) -> State:
    """Return the state for an evaluation; before any training, the state of the run directory."""
    if setup.state is None:
        state, path = (
            _probed(workers, source, say, training=False),
            workers.config.run_dir.path,
        )
        newest = None
        if setup.put_loaded is not None:
            setup.put_loaded(state)
        elif path is not None and not setup.is_fresh:
            newest = resume.go_to_newest(Path(path), state, {}, say)
            if newest is not None:
                setup.course = resume.course_of(newest.record)
                setup.saved_shards = int(newest.record["shards"])
                evaluating = f"evaluating step {state.global_step:,} from {newest.path}"
                say(RunEvent(evaluating, NOTE))
        workers.replicas.choose_kernels(state.model, resume.kernels_of(newest))
        setup.state = state
    return setup.state


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
    workers: WorkerGroup,
    setup: TrainingSetup,
    data: DatasetConfig,
    duration: StopAfter,
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
    config, dataset = workers.config, data.dataset
    if workers.follows:
        # Threads as on rank 0. With more threads, OpenMP's threads spin between two operations of
        # an exchange on cores where other ranks compute; if such a thread loses its core, all ranks
        # wait. Computing is repeatable from the first shard on: ranks compare the bits.
        computing = repeatable(workers.replicas.computing, workers.devices)
        with intra_op_threads(config.workers.threads), computing:
            follow(
                workers,
                dataset,
                partial(_probed, workers, note=lambda _: None, training=True),
            )
    with ExitStack() as stack:
        # 1. The run directory, locked from here on; the plan.
        stack.enter_context(setup.lock.held(say))
        if config.run_dir.path is not None:
            setup.begin(Path(config.run_dir.path), say)
        at("checking the newest checkpoint")
        plan = planned(workers, setup, data)
        setup.plan, setup.shards = plan, plan.shards
        last_step = duration.last_step(plan)
        plan.course = replace(plan.course, last_step=last_step)
        stack.enter_context(intra_op_threads(config.workers.threads))
        source = Source(dataset, plan, config.loading.collate, config.loading.augment)
        notes = stack.enter_context(repeatable(workers.replicas.computing, workers.devices))
        stack.enter_context(workers.starting())
        # 2. The state, tried on one shard and restored.
        if workers.rank_group is not None:
            refuse_ranks()
            stack.callback(workers.rank_group.leave)
            at("starting the other ranks: each runs the script up to its training loop")
            workers.start_ranks()
            workers.rank_group.meet(workers.master_device, workers.timeout_s)
        is_first = not setup.was_trained
        reports: list[str] = []  # of this fit alone; notes are shown once for all fits
        state = _trainable_state(workers, setup, source, notes, reports, say, at)
        if not is_first:
            begin_fit(setup)
            _compare_rows(workers, setup, state, source, last_step)
        workers.replicas.look_at_rows(state.model, dataset, config.loading)
        is_cut = workers.replicas.are_in_stages
        at("cutting the model into stages" if is_cut else "trying the smallest shard of an epoch")
        left = range(state.global_step, last_step)
        notes += look_ahead(workers.replicas, state, workers.probe_replica, source, left)
        # 3. The lines before the first update.
        origin = ""
        if config.shards is None:
            least = workers.least_workers if state.global_step == 0 else None
            origin = whence(plan, least, workers.rule)
        first = opening(
            plan,
            workers.groups,
            workers.master_device,
            state.model,
            least_workers=workers.least_workers,
            threads=config.workers.threads,
            engine=workers.engine,
            rule=workers.rule,
            computing=workers.replicas.computing,
            memory_fraction=workers.memory_fraction,
            whence=origin if is_new(origin) else "",
        )
        if workers.why is not None:
            first.append(workers.why)
        if workers.rank_group is not None:
            first.append(workers.rank_group.bound)
        say(as_note(first.pop(0)))
        for line in (*first, *workers.loader_messages, *notes):
            once(say)(as_note(line))
        for line in reports:
            say(as_note(line))
        workers.replicas.tell(say)
        loop = Loop(state, plan, last_step, setup.saved, None, iter(()))
        if state.global_step >= last_step:
            run_dir = None if config.run_dir.path is None else Path(config.run_dir.path)
            end_earlier_fit(setup, state, run_dir, last_step, say)
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
        facts = setup.facts(workers, state)
        begun = leading if workers.rank_group is not None else partial(looping, facts=facts)
        yield stack.enter_context(begun(loop, workers, source, stops=stops, say=say))


def _trainable_state(
    workers: WorkerGroup,
    setup: TrainingSetup,
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
    if setup.state is None or not setup.was_trained:
        if setup.state is not None:
            setup.state.model_edits.revert()  # those of the run directory are loaded again
        # A new state, if the former was only evaluated, or did not fit its checkpoint.
        setup.was_trained, setup.state = False, None
        at("loading a first shard and computing it, to check the model and the loss function")
        state = _probed(workers, source, notes.append, training=True, announce=once(say))
        if workers.has_processes:
            free_cache(workers.devices)
        was = _restore(workers, setup, state, source, reports.append, at)
        at("timing the kernels of matrix products")
        notes += workers.replicas.choose_kernels(state.model, was)
        if (now := workers.replicas.computing.kernels) != (was or now):
            since = f"since step {state.global_step:,}"
            workers.replicas.notes.doubt(f"kernels was {was} and is {now} {since}")
        at("computing parts of a shard, to find likely mistakes in the loss function")
        look_for_mistakes(workers, state, source)
        setup.was_trained, setup.state = True, state
    refuse_half_an_update(setup.state)
    return setup.state


def _compare_rows(
    workers: WorkerGroup, setup: TrainingSetup, state: State, source: Source, last_step: int
) -> None:
    """Sample the rows of a later fit; compare them if the fit was interrupted.

    Raises:
        MisfitError: the interrupted fit had different rows.
    """
    path, plan = workers.config.run_dir.path, source.plan
    if path is None:
        return
    setup.row_sample = row_sample(source.dataset, plan.rows, plan.seed)
    was, n = setup.resumed, state.global_step
    if was is None or n >= last_step:
        return
    setup.resumed = None
    facts = setup.facts(workers, state)
    resume.require_same_run(Path(path), was, facts)
    for difference in resume.differences(was, facts):
        workers.replicas.notes.doubt(f"{difference} since step {n:,}")


def _probed(
    workers: WorkerGroup,
    source: Source,
    note: Say,
    *,
    training: bool,
    announce: Say | None = None,
) -> State:
    workers.bound_memory()
    config = workers.config
    if workers.replicas.computing.compile:
        announce = announce or note
        announce("compiling: the first shard of each shape takes seconds to minutes longer")
    while True:
        has_towers = workers.engine == selection.TOWERS
        make_state = partial(
            State,
            workers.model,
            workers.master_device,
            shared=workers.shares_parameters,
            optimize=config.optimize,
            loss=config.loss,
            notes=workers.replicas.notes,
            exchanging=None if workers.rank_group is None else workers.rank_group.exchanging,
            served=config.workers.servers is not None,
            parts=workers.parts,
        )
        try:
            return probed(
                workers.model,
                make_state,
                workers.probe_replica,
                source.load((0, 0)),
                partial(source.load, (0, 1) if source.plan.shards_of(0) > 1 else (1, 0)),
                loss=config.loss,
                notes=workers.replicas.notes,
                plan=source.plan,
                training=training,
                watching=partial(workers.replicas.watching, towers=has_towers),
                contents=workers.replicas.contents,
                say=note,
            )
        except CopyError as error:
            if not has_towers:
                raise
            workers.give_up_towers(error.reason)
        except CompileError as error:
            note(f"compile is off: {error.why}")
            workers.replicas.give_up_compiling()


def _restore(
    workers: WorkerGroup, setup: TrainingSetup, state: State, source: Source, say: Say, at: Say
) -> str | None:
    """Load the newest checkpoint into the state, if there is one.

    Returns:
        The kernels of matrix products in the resumed run; None: the run begins.
    """
    run_dir, notes, plan = workers.config.run_dir, workers.replicas.notes, source.plan
    if run_dir.path is None:
        return None
    at("loading a few rows twice, to recognise the dataset when the run is resumed")
    setup.row_sample = row_sample(source.dataset, plan.rows, plan.seed)
    setup.resumed = None
    facts = setup.facts(workers, state)
    at("loading the newest checkpoint")
    path, per_epoch = Path(run_dir.path), plan.steps_per_epoch
    newest = resume.restore(path, state, facts, per_epoch, say, notes.doubt)
    if newest is not None:
        notes.remember(resume.doubts_of(newest.record))
        setup.saved = (state.global_step, newest.path)
        if plan.course.last_step < state.global_step < newest.record.get("last_step", 0):
            setup.resumed = newest.record  # a later fit goes on from this record
        if setup.put_loaded is not None:
            say("the loaded weights are not used: the run resumes with the checkpoint's weights")
        if run_dir.init_from is not None:
            say(
                f"init_from={str(run_dir.init_from)!r} is not used: the run resumes with the "
                "checkpoint's weights"
            )
    return resume.kernels_of(newest)
