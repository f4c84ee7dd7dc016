"""Rank 0 of a loop: calls methods on all ranks, and all ranks make each update together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

from quorate.engines import Channel
from quorate.engines.collective.liveness_monitor import LivenessMonitor
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.collective.rank_group import STOP_CODE, RankGroup
from quorate.engines.job import Job
from quorate.engines.spot_check import SpotCheck, SpotCheckResult
from quorate.engines.tracing import current
from quorate.engines.worker_status import WorkerStatus
from quorate.errors import RankError, UserError
from quorate.replica.beside.values import NO_VALUES
from quorate.replica.shard_sum import Part
from quorate.replica.witness.places import place_doubts
from quorate.training.collective import share
from quorate.training.collective.identity import compare, identity
from quorate.training.collective.rank_worker import RankWorker
from quorate.training.drive import ReadyStep
from quorate.training.optimizing.known_optimizers import sent_values
from quorate.training.optimizing.update import UpdateResult
from quorate.training.owners.rank_owners import RankOwners
from quorate.training.owners.saves import Saves
from quorate.training.stop import Stops
from quorate.training.training_loop import StartedWorkers, TrainingLoop

Update = tuple[ReadyStep, UpdateResult]


@contextmanager
def start_rank_loop(loop: TrainingLoop) -> Iterator[StartedWorkers]:
    """Open a loop on all ranks inside the block, and end all ranks but rank 0 afterwards.

    Raises:
        UserError: a rank computes different gradients, or has different settings or data.
        RankError: a rank is lost.
    """
    setup, state, plan, stops = loop.setup, loop.state, loop.plan, loop.stops
    workers, source, say = setup.workers, loop.source, setup.say
    rank_group, notes = workers.rank_group, workers.replicas.notes
    assert rank_group is not None
    ranks = rank_group.meet(workers.master_device, workers.timeout_s)
    with ExitStack() as stack:
        stack.callback(_leave, loop, rank_group)
        ranks.monitor.on_stop = partial(_ask, stops)
        with ranks.in_step():
            worker = stack.enter_context(closing(_opened(loop, ranks)))
            ranks.monitor.sheet = worker.sheet
            ranks.monitor.on_lost = partial(_lost, stops, worker)
            identities = ranks.gather(identity(worker, source, workers))
            rank_group.have_met()
            if spread := state.phases.spread:
                state.saves = Saves(worker.owners, spread, say)
                if setup.run_dir is not None and state.saves.are_by_all:
                    state.saves.rehearse(setup.run_dir)
        places: list[str] = []
        if rank_group.is_of_torchrun:
            places = place_doubts(state.model, workers.config.loss)
        compare(identities, places)
        for doubt in places:
            notes.doubt(doubt)
        if (factor := worker.slowest_factor(plan.shards)) > 1:
            say(
                f"{plan.shards} shards on {ranks.size} ranks: the busiest rank computes "
                f"{factor:.2f} times an equal share; a power of two for shards or ranks gives 1"
            )
        if (order := rank_group.native_order) is not None:
            notes.doubt(order)
        worker.settle()

        def ask(job: SpotCheck, _patience_s: float) -> Mapping[int, SpotCheckResult]:
            with ranks.in_step():
                found: Mapping[int, SpotCheckResult] = ranks.call("check", job.options())
                return found

        spot_checks = workers.spot_checks(state, source, ask)
        lead = _Lead(worker, loop)
        transport = RankStatus(ranks.monitor)
        yield StartedWorkers(transport, lead.updates(), lead, worker.stray_writes, spot_checks)


def _opened(loop: TrainingLoop, ranks: RankControl) -> RankWorker:
    """Send the state to all ranks, and return the worker of rank 0.

    Raises:
        UserError: a rank has a different model.
    """
    state, steps = loop.state, (loop.state.global_step, loop.last_step)
    workers = loop.setup.workers
    decided = workers.replicas.computing.decided
    ranks.tell("open", loop.plan.to_json(), decided, share.described(state))
    if misfits := [text for text in ranks.gather("") if text]:
        raise UserError(misfits[0])
    share.send(ranks, state)
    assert isinstance(state.owners, RankOwners)
    for optimizer in state.phases.spread:
        optimizer.send(state.owners)
    values = share.news_of_values(state, NO_VALUES)
    ranks.tell("join", steps, values)
    worker = RankWorker(ranks, workers, state, loop.source, range(*steps))
    worker.take_values(values)
    return worker


def _ask(stops: Stops, why: str) -> None:
    """Request a stop because a rank has received a signal to end."""
    if stops.exit_code is None:
        stops.exit_code = STOP_CODE
    stops.request(why)


def _lost(stops: Stops, worker: RankWorker, why: str) -> None:
    """Stop the loop, and interrupt a wait of the main thread for a shard: a rank is lost."""
    stops.request(why)
    worker.leave(RankError(why))


def _leave(loop: TrainingLoop, rank_group: RankGroup) -> None:
    """Gather the state on rank 0, and end all other ranks."""
    state, is_whole = loop.state, False

    def take_all() -> None:
        nonlocal is_whole
        state.leave_ranks()
        is_whole = True

    if state.update.is_half_made and rank_group.ranks is not None:
        # An error in the middle of an update, maybe on rank 0 alone: ranks wait for an exchange,
        # and not for the last call.
        rank_group.ranks.break_off()
    try:
        rank_group.leave(take_all, loop.stops.exit_code or 0)
    except RankError as error:
        loop.setup.say(f"{error}: resume from the newest checkpoint")
    state.saves = None
    if not is_whole:
        state.update.is_half_made = True  # the state of the lost ranks is missing
    loop.setup.workers.stay_alone(
        "this training loop computes on towers (threads), because the ranks ended with the first "
        "loop"
    )


class _Lead:
    """The steps of a loop on rank 0, and their progress.

    All ranks compute each step in lockstep. No shard is dealt to another rank, and the ranks end
    with the first lost rank: so there is nothing for a ``Coordinator`` to decide.
    """

    def __init__(self, worker: RankWorker, loop: TrainingLoop) -> None:
        self._worker, self._ranks, self._loop = worker, worker.ranks, loop
        self._state = state = loop.state
        self.first_step = state.global_step
        self.begun_at: float | None = None
        self.reason = "all steps are done"
        self._is_in_step = False  # True while the other ranks make an update
        self._groups: list[dict[str, Any]] | None = None  # last sent to all ranks, if any
        state.model_edits.watch_values(partial(share.values, state))
        worker.owners.note_state()
        self._sent_changes = state.model_edits.model_changes.number

    def updates(self) -> Iterator[Update]:
        """Yield the updates up to the last step, or up to a request to stop."""
        self.begun_at = time.monotonic()
        for step in range(self.first_step, self._loop.last_step):
            self._ranks.require_all()  # a lost rank requests a stop too
            if (reason := self._loop.stops.reason) is not None:
                self.reason = reason
                break
            yield self._update(step)
        self._ranks.call("collect_notes")

    def _update(self, step: int) -> Update:
        """Make an update.

        Breaks off after an error that leaves other ranks in the middle of an exchange.
        """
        self._loop.stops.start_time_limits()
        trace, began = current(), time.monotonic()
        try:
            parts = self._sums(step)
            if trace is not None:
                trace.note_wait(began)
            return self._apply(step, parts)
        except RankError:
            self._ranks.require_all()  # raises with the name of the lost rank, if known
            raise
        except BaseException as error:
            # All ranks raise the error of a shard, and wait for the next call.
            is_half_made = self._state.update.is_half_made
            if is_half_made or (self._is_in_step and not isinstance(error, Exception)):
                self._ranks.break_off()
            if self._is_in_step and not is_half_made:
                self._worker.restore()
            raise

    def _sums(self, step: int) -> list[Part]:
        """Let all other ranks make an update, and return the parts of the step's sum."""
        self._worker.owners.require_same_state()
        news = self._news()
        self._is_in_step = True
        for optimizer in self._state.phases.spread:
            if not optimizer.is_away:  # user code may have changed the state
                optimizer.send(self._worker.owners)
        self._ranks.tell("update", step, *news)
        return self._worker.sums(step, *news)

    def _apply(self, step: int, parts: list[Part]) -> Update:
        """Make the update of a step, together with all other ranks."""
        ready, applied = self._worker.apply(step, parts)
        self._is_in_step = False
        for each in applied.shares:
            self._state.tally.applied(each.worker, 0)
        self._loop.record_update(ready, applied)
        self._state.model_edits.updated()
        self._worker.owners.note_state()
        return ready, applied

    def _news(self) -> tuple[Any, ...]:
        """Return the arguments of the next update besides the step: changes since the last one."""
        state, changes = self._state, self._state.model_edits.model_changes
        groups = [*map(sent_values, state.phases.param_groups)]
        is_same, self._groups = groups == self._groups, groups
        is_changed = state.model_edits.have_values_changed()
        is_changed = is_changed or changes.number != self._sent_changes
        self._sent_changes = changes.number
        return (
            self._worker.exchange.seen_order(),
            None if is_same else groups,
            changes.to_json() if is_changed else None,
            share.news_of_values(state, self._worker.values),
        )


class RankStatus:
    """The transport of a loop on ranks: has the status of all ranks, and computes no more jobs."""

    can_replace = False
    takes_runs = False

    def __init__(self, monitor: LivenessMonitor) -> None:
        self._monitor = monitor

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return whether the ranks can compute with a dataset: no, ranks compute the loop alone."""
        return False

    def open(self, job: Job) -> Channel:
        """Refuse a job: see ``can_compute``.

        Raises:
            RankError: always.
        """
        raise RankError(f"the ranks are asked for {job.name}, and compute the loop's steps alone")

    def status(self) -> list[WorkerStatus]:
        """Return the status of all ranks; of the other ranks, as of the last heartbeat."""
        return self._monitor.status()

    def close(self) -> None:
        """Do nothing: the loop ends the ranks."""
