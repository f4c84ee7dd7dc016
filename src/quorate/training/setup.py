"""The setup of a trainer: run directory, plan and state, and the preparation of each loop.

A loop is prepared in four steps: the run directory is locked and a plan is made; the state is
made, tried on one shard and restored from the newest checkpoint; the first lines are shown; then
``TrainingLoop`` starts the workers.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quorate.coordination.epochs import SHORT, Course
from quorate.coordination.plan import Plan, PlanByShard
from quorate.coordination.run_event import NOTE, RunEvent, as_note, showing
from quorate.data import dataloader
from quorate.data.row_sample import row_sample
from quorate.data.source import Source, length
from quorate.engines import Transport, selection
from quorate.engines.collective.rank_place import note_done, was_done_before
from quorate.errors import CheckpointError, CompileError, CopyError, SettingError, UserError
from quorate.machine.memory_fraction import free_cache
from quorate.machine.processor import processors
from quorate.replica.deterministic import repeatable
from quorate.replica.phases.losses import PhaseLosses
from quorate.services.checkpoints import files
from quorate.services.display.shown import OutputSettings
from quorate.services.display.straggler import Stragglers
from quorate.services.run_directory.lock import RunLock
from quorate.settings import resolved, switch
from quorate.training import resume, weights
from quorate.training.collective.follow import follow
from quorate.training.collective.lead import start_rank_loop
from quorate.training.config import DatasetConfig, StopAfter, too_many_shards
from quorate.training.first_lines import first_lines
from quorate.training.notices import once
from quorate.training.observer import refuse_ranks
from quorate.training.optimizing.cores import intra_op_threads, threads_of_loop
from quorate.training.owners.server_owners import ServerStandIn
from quorate.training.probing.checks import cut_once, try_row_alone
from quorate.training.probing.mistakes import look_for_mistakes
from quorate.training.probing.probe import probed
from quorate.training.state import State
from quorate.training.stop import Stops
from quorate.training.training_loop import TrainingLoop, start_workers
from quorate.training.worker_group import WorkerGroup

Say = Callable[[str], None]


class TrainingSetup:
    """The parts of a trainer that outlive a training loop: run directory, number V, plan and state.

    Args:
        workers: the workers of the trainer.

    Attributes:
        say: shows a line to the user; during ``fit``, above the progress bar.
        loop: the current loop, if there is one.
        stops: the requests to end the current loop, evaluation or prediction, if there is one.
        lock: the lock of the run directory, held during a loop.
        is_fresh: whether the next loop first moves the content of the run directory aside
            (``RunDir(fresh=True)``). False if an earlier start of these ranks by torchrun did so.
        shards: V; None before the first loop, unless set by the user.
        plan: the plan of the last loop.
        state: the state; None before the first training or evaluation.
        is_trainable: whether ``state`` has computed a training shard and was restored from the
            newest checkpoint. A state made for an evaluation was not.
        saved: step and directory of the newest checkpoint; None: there is none, or the step of the
            newest is saved again at the end of the loop.
        apply_loaded_weights: puts the weights of ``Trainer.load`` into a state; None unless weights
            were loaded before there was a state.
        row_sample: hashes of a few rows of the dataset, for checkpoints.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self.config = config = workers.config  # without the settings of a ``DataLoader``
        path = config.run_dir.path
        self.run_dir = None if path is None else Path(path)
        self.say: Say = showing(logging.getLogger("quorate").warning)
        self.loop: TrainingLoop | None = None
        self.stops: Stops | None = None
        self.lock = RunLock(self.run_dir)
        self.is_fresh = config.run_dir.fresh
        if self.is_fresh and self.run_dir is not None:
            self.is_fresh = not was_done_before(_task_of_moving_aside(self.run_dir))
        self.shards = config.shards
        self.plan: Plan | None = None
        self.state: State | None = None
        self.is_trainable = False
        self.saved: tuple[int, Path] | None = None
        self.apply_loaded_weights: Callable[[State], None] | None = None
        self.row_sample: dict[str, str | None] | None = None
        # The record of a checkpoint that was read for an evaluation without training.
        self._evaluated_record: dict[str, Any] | None = None
        # The newest weights of the run, while the model has older weights: a restarted script with
        # several fits passes the fits that are done, and may use the model after each of them.
        self._weights_set_aside: dict[str, torch.Tensor] | None = None
        # The record of a checkpoint saved by a later fit of the script than the present one. The
        # later fit compares its rows with the record when the script arrives there.
        self._unreached_record: dict[str, Any] | None = None

    @property
    def transport(self) -> Transport | None:
        """The transport of the current loop, if there is one."""
        return None if self.loop is None else self.loop.transport

    @property
    def shards_of_run(self) -> int | None:
        """The number V of the run, as far as it is known."""
        record = self._evaluated_record
        return self.shards or (None if record is None else int(record["shards"]))

    # --- data and plan ----------------------------------------------------------------------------

    def read_dataset_config(
        self,
        given: Any,
        *,
        shuffle: bool | None = None,
        trains: bool = True,
        name: str = "dataset",
    ) -> DatasetConfig:
        """Return the dataset and settings in the user's argument, a dataset or a loader.

        Args:
            shuffle: the user's choice; None: no choice.
            trains: whether the dataset is for training, not for evaluation.
            name: name of the argument, for messages.

        Raises:
            SettingError: the loader cannot be read by position.
        """
        return dataloader.read_dataset_config(
            given,
            self.config.loading,
            shuffle=None if shuffle is None else switch("shuffle", shuffle),
            batch_size=self.config.batch_size if trains else None,
            name=name,
        )

    def plan_of(self, data: DatasetConfig) -> Plan:
        """Return the plan of a training loop over a dataset; changes nothing.

        Where the settings leave the number V of shards open, a training loop fixes it: as in the
        newest checkpoint, or the number of workers.

        Raises:
            DataError: the argument is no map-style dataset, or is empty.
            SettingError: there are fewer rows than shards, or fewer shards than the rule needs.
        """
        workers, shards = self.workers, self.shards
        rule, rows = workers.rule, length(data.dataset)
        config = workers.config.with_loading(data.loading)
        sampling, dealt = data.loading.sampling, rows
        if sampling is not None:
            sampling.require_rows(rows)
            dealt = sampling.rows
            if not data.shuffle:
                fix = "leave shuffle out: rows come as they are drawn"
                raise SettingError("shuffle", data.shuffle, "True with Loading(sampling=)", fix)
        if shards is None:
            newest = self._newest_checkpoint()
            count = min(workers.least_workers, config.batch_size, dealt)
            if newest is None and config.compute.strict and workers.keeps_bits(count):
                expected = "a number: a strict run does not take it from the number of workers"
                raise SettingError("shards", None, expected, f"pass shards={count}")
            shards = count if newest is None else int(newest.record["shards"])
        if shards > dealt:
            of = "the dataset" if sampling is None else "an epoch"
            raise too_many_shards(shards, f"{dealt} rows of {of}")
        if shards < rule.least_shards:
            expected, fix = f"at most the {shards} shards of a batch", "choose a smaller quorum"
            raise SettingError("update", rule.name, expected, f"{fix}, or more shards")
        kind = PlanByShard if rule.by_shard else Plan
        return kind(
            rows=rows,
            batch_size=min(config.batch_size, dealt),
            shards=shards,
            seed=config.seed,
            shuffle=data.shuffle,
            order=config.loading.order,
            last=config.loading.last or SHORT,
            sampling=sampling,
            round=config.loss.round if isinstance(config.loss, PhaseLosses) else None,
        )

    def _newest_checkpoint(self) -> files.ValidCheckpoint | None:
        """Return the checkpoint to resume from, without the state."""
        facts = self.workers.config.facts()
        if self.run_dir is None or self.is_fresh:
            return None
        if self.config.shards is None:
            del facts["shards"]  # the run resumes with the shards of the checkpoint
        return files.find(self.run_dir, partial(resume.require_same_run, facts=facts))

    def position_of_evaluation(self, global_step: int) -> Course:
        """Return the position in its run of an evaluation between two updates."""
        if self.plan is not None:
            stands_at = (global_step, self.plan.epoch(global_step))
            return Course(self.plan.course.last_step, stands_at)
        record = self._evaluated_record
        return Course(0, (global_step, 0)) if record is None else resume.course_of(record)

    def facts(self, state: State) -> dict[str, Any]:
        """Return the description of the run in a checkpoint, for JSON. A resume compares facts."""
        assert self.plan is not None
        workers, plan = self.workers, self.plan
        computing = workers.replicas.computing
        return {
            "epoch": state.global_step // plan.steps_per_epoch,
            **workers.config.facts(),
            # Facts found at run time: no settings, or settings that were adjusted.
            "shards": plan.shards,
            "rows": plan.rows,
            "shuffle": plan.shuffle,
            "order_sha256": getattr(plan.order, "sha256", None),
            "sampled_rows": None if plan.sampling is None else plan.dealt_rows,
            "last_step": plan.course.last_step,
            "progress": "progress" in plan.course.asked,
            "row_sample": self.row_sample,
            "compile": computing.compile,
            "deterministic": computing.deterministic,
            "kernels": computing.kernels,
            "random": computing.random,
            **({} if plan.round is None else {"round": plan.round.to_json()}),
            **state.phases.facts(),
            "engine": workers.engine,
            "devices": sorted({str(group) for group in workers.groups}),
            "device_types": sorted({device.type for device in workers.devices}),
            "processors": processors(workers.devices),
            "workers": len(workers.groups),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "account": state.account(),
            "doubts": workers.replicas.notes.doubts,
        }

    # --- around loops -----------------------------------------------------------------------------

    @contextmanager
    def stoppable(self) -> Iterator[Stops]:
        """Yield requests to end an evaluation or prediction, the block.

        Inside a training loop the requests stay empty: ``Trainer.stop`` ends the loop.
        """
        stops = Stops()
        if self.stops is not None:
            yield stops
            return
        self.stops = stops
        try:
            yield stops
        finally:
            self.stops = None

    @contextmanager
    def reporting_stragglers(self, mention: Say | None = None) -> Iterator[None]:
        """Name slow workers in one line at the end of the block, outside of a training loop.

        Inside a training loop, the loop names the workers at its end.

        Args:
            mention: shows the line, unless the run is quiet.
        """
        if self.stops is not None:
            yield
            return
        self.workers.stragglers = stragglers = Stragglers.none()
        try:
            yield
        finally:
            if (line := stragglers.summary()) is None:
                pass
            elif mention is not None:
                mention(line)
            elif not resolved(OutputSettings, None).quiet:
                self.say(line)

    def restore_newest_weights(self) -> None:
        """Restore the newest weights of the state, set aside by an earlier fit."""
        newest, self._weights_set_aside = self._weights_set_aside, None
        if newest is not None:
            weights.restore_weights(newest, self.state)

    @contextmanager
    def prepare_loop(
        self,
        data: DatasetConfig,
        stop_after: StopAfter,
        stops: Stops,
        at: Say = lambda _: None,
    ) -> Iterator[TrainingLoop]:
        """Prepare a training loop inside the block. No worker is started.

        On a rank other than 0, the call computes the loop with rank 0, and ends the process.

        Args:
            stops: requests to end the loop.
            at: receives the name of each phase of the preparation that may take long, such as
                "loading the newest checkpoint", when the phase begins.

        Raises:
            UserError: something cannot work.
        """
        if self.stops is not None:
            raise UserError(
                "updates", "another loop over updates is still open", fix="close that loop first"
            )
        workers, config, dataset = self.workers, self.workers.config, data.dataset
        rank_group, threads = workers.rank_group, config.workers.threads
        if workers.follows:
            # This process is a rank other than 0, and does not return. Threads as on rank 0: with
            # more threads, OpenMP's threads spin between two operations of an exchange on cores
            # where other ranks compute; if such a thread loses its core, all ranks wait. Computing
            # is repeatable from the first shard on: ranks compare the bits.
            computing = repeatable(workers.replicas.computing, workers.devices)
            with intra_op_threads(threads), computing:
                follow(workers, dataset, partial(self._new_tried_state, note=lambda _: None))
        with ExitStack() as stack:
            self.stops = stops
            stack.callback(self._leave_loop)
            # 1. The run directory, locked from here on; the plan.
            stack.enter_context(self.lock.held(self.say))
            if self.run_dir is not None:
                resume.begin(self.run_dir, self.say, fresh=self.is_fresh)
                if self.is_fresh:
                    note_done(_task_of_moving_aside(self.run_dir))
                self.is_fresh = False
            at("checking the newest checkpoint")
            self.plan = plan = self.plan_of(data)
            self.shards = plan.shards
            last_step = stop_after.last_step(plan)
            plan.course = replace(plan.course, last_step=last_step)
            stack.enter_context(threads_of_loop(threads))
            source = Source(dataset, plan, config.loading.collate, config.loading.augment)
            notes = stack.enter_context(repeatable(workers.replicas.computing, workers.devices))
            stack.enter_context(workers.starting())
            # 2. The state, tried on one shard and restored.
            if rank_group is not None:
                refuse_ranks()
                stack.callback(rank_group.leave)
                at("starting the other ranks: each runs the script up to its training loop")
                workers.start_ranks()
                rank_group.meet(workers.master_device, workers.timeout_s)
            is_first = not self.is_trainable
            # Lines about the checkpoint, shown in each fit. Notes are shown once for all fits.
            reports: list[str] = []
            state = self._state_for_training(source, notes, reports, at)
            if not is_first:
                self.restore_newest_weights()
                self._check_rows_of_later_fit(state, source, last_step)
            workers.replicas.look_at_rows(state.model, dataset, config.loading)
            is_cut = workers.replicas.are_in_stages
            at(
                "cutting the model into stages"
                if is_cut
                else "trying the smallest shard of an epoch"
            )
            notes += cut_once(workers, state, source)
            try_row_alone(workers, state, source, range(state.global_step, last_step))
            # 3. The lines before the first update.
            first, *more = first_lines(workers, plan, state)
            self.say(as_note(first))
            for line in (*more, *workers.loader_messages, *notes):
                once(self.say)(as_note(line))
            for line in reports:
                self.say(as_note(line))
            workers.replicas.tell(self.say)
            # 4. The loop, without workers.
            n = state.global_step
            start = start_workers if rank_group is None else start_rank_loop
            loop = TrainingLoop(self, state, source, last_step, stops, start)
            if not loop.has_updates:
                if n >= last_step:
                    self._end_fit_without_updates(state, last_step)
                else:
                    self.say(RunEvent(f"stopped after step {n:,}: {stops.reason}", NOTE))
                state.leave_ranks()
            self.loop = loop
            yield loop

    def _leave_loop(self) -> None:
        self.stops = self.loop = None

    def _end_fit_without_updates(self, state: State, last_step: int) -> None:
        """Report a fit whose updates a former run made; give the model the weights of that fit.

        The run directory has the newest state and a few older states. Between two fits, the script
        may use the model as the earlier fit left it, for example for rollouts. So after an earlier
        fit the model has the weights of that time, if a checkpoint has them, until the next fit.
        """
        n = state.global_step
        if n == last_step:
            self.say(f"nothing to do: {n:,} of {last_step:,} updates are done")
            return
        line = (
            f"nothing to do: this fit ends after update {last_step:,}, and the run has made {n:,}"
        )
        if self.run_dir is None or isinstance(state.owners, ServerStandIn):
            self.say(line)
            return
        path = files.checkpoint_of(self.run_dir, last_step)
        try:
            files.check(path, last_step)
            newest = weights.copy_weights(state)
            weights.give_weights(path, lambda _: None, state)
        except CheckpointError:  # usually: there is no such checkpoint
            self.say(
                f"{line}; the model has the weights of update {n:,}, because no checkpoint of "
                f"update {last_step:,} is left, so code between two fits (rollouts) computes "
                "different results; keep more checkpoints with RunDir(keep=)"
            )
            return
        self._weights_set_aside = newest
        self.say(f"{line}; until the next fit the model has the weights of update {last_step:,}")

    # --- the state --------------------------------------------------------------------------------

    def state_for_evaluation(self, source: Source) -> State:
        """Return the state for an evaluation; before any training, the state of the run directory.

        A state made here is replaced at the first training.

        Args:
            source: the rows to evaluate; the first shard is tried.
        """
        if self.state is None:
            state, newest = self._new_tried_state(source, self.say, training=False), None
            if self.apply_loaded_weights is not None:
                self.apply_loaded_weights(state)
            elif self.run_dir is not None and not self.is_fresh:
                newest = resume.go_to_newest(self.run_dir, state, {}, self.say)
                if newest is not None:
                    self._evaluated_record = newest.record
                    evaluating = f"evaluating step {state.global_step:,} from {newest.path}"
                    self.say(RunEvent(evaluating, NOTE))
            self.workers.replicas.choose_kernels(state.model, resume.kernels_of(newest))
            self.state = state
        return self.state

    def _state_for_training(
        self, source: Source, notes: list[str], reports: list[str], at: Say
    ) -> State:
        """Return the state; at first use the state is made, tried on one shard, and restored.

        Args:
            notes: receives notes about the model and the settings.
            reports: receives lines about the checkpoint.
        """
        workers = self.workers
        if self.state is None or not self.is_trainable:
            if self.state is not None:
                self.state.model_edits.revert()  # the edits in the checkpoint are loaded again
            # A new state, if the former was only evaluated, or did not fit its checkpoint.
            self.is_trainable, self.state = False, None
            at("loading a first shard and computing it, to check the model and the loss function")
            state = self._new_tried_state(source, notes.append, announce=once(self.say))
            if workers.has_processes:
                free_cache(workers.devices)
            saved_kernels = self._restore(state, source, reports.append, at)
            at("timing the kernels of matrix products")
            notes += workers.replicas.choose_kernels(state.model, saved_kernels)
            kernels = workers.replicas.computing.kernels
            if saved_kernels and kernels != saved_kernels:
                since = f"since step {state.global_step:,}"
                doubt = f"kernels was {saved_kernels} and is {kernels} {since}"
                workers.replicas.notes.doubt(doubt)
            at("computing parts of a shard, to find likely mistakes in the loss function")
            look_for_mistakes(workers, state, source)
            self.is_trainable, self.state = True, state
        self.state.require_whole_update()
        return self.state

    def _new_tried_state(
        self, source: Source, note: Say, *, training: bool = True, announce: Say | None = None
    ) -> State:
        """Return a new state, after computing the first shard of a source with the state."""
        workers = self.workers
        workers.bound_memory()
        if workers.replicas.computing.compile:
            announce = announce or note
            announce("compiling: the first shard of each shape takes seconds to minutes longer")
        while True:
            try:
                return probed(workers, source, training=training, say=note)
            except CopyError as error:
                if workers.engine != selection.TOWERS:
                    raise
                workers.give_up_towers(error.reason)
            except CompileError as error:
                note(f"compile is off: {error.why}")
                workers.replicas.give_up_compiling()

    def _restore(self, state: State, source: Source, say: Say, at: Say) -> str | None:
        """Load the newest checkpoint into the state, if there is one.

        Returns:
            The kernels of matrix products in the resumed run; None: the run begins.
        """
        notes, plan, unused = self.workers.replicas.notes, source.plan, []
        if self.run_dir is None:
            return None
        at("loading a few rows twice, to recognise the dataset when the run is resumed")
        self.row_sample = row_sample(source.dataset, plan.rows, plan.seed)
        self._unreached_record = None
        facts = self.facts(state)
        at("loading the newest checkpoint")
        newest = resume.restore(self.run_dir, state, facts, plan.steps_per_epoch, say, notes.doubt)
        if newest is not None:
            notes.remember(resume.doubts_of(newest.record))
            self.saved = (state.global_step, newest.path)
            # This fit ends before the checkpoint, and the fit that saved it was interrupted.
            if plan.course.last_step < state.global_step < newest.record.get("last_step", 0):
                self._unreached_record = newest.record
            if self.apply_loaded_weights is not None:
                unused.append("the loaded weights are")
            if (path := self.config.run_dir.init_from) is not None:
                unused.append(f"init_from={str(path)!r} is")
        for subject in unused:
            say(f"{subject} not used: the run resumes with the checkpoint's weights")
        return resume.kernels_of(newest)

    def _check_rows_of_later_fit(self, state: State, source: Source, last_step: int) -> None:
        """Sample the rows of a fit after the first; compare with the rows of an interrupted fit.

        Raises:
            MisfitError: the interrupted fit had different rows.
        """
        if self.run_dir is None:
            return
        self.row_sample = row_sample(source.dataset, source.plan.rows, source.plan.seed)
        was, n = self._unreached_record, state.global_step
        if was is None or n >= last_step:
            return
        self._unreached_record = None
        facts = self.facts(state)
        resume.require_same_run(self.run_dir, was, facts)
        for difference in resume.differences(was, facts):
            self.workers.replicas.notes.doubt(f"{difference} since step {n:,}")


def _task_of_moving_aside(run_dir: Path) -> str:
    """Return the name of the task, for notes shared by ranks and by starts of torchrun."""
    return f"moving aside what is in {run_dir.absolute()}"
