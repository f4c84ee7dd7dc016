"""Rank 0 of a loop: sends records to all ranks; all ranks make each update together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quorate.data.source import Source
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.collective.rank_group import STOP_CODE, RankGroup
from quorate.engines.collective.step_contribution import StepContribution
from quorate.engines.spot_check import SpotCheck, SpotCheckResult
from quorate.errors import RankError, UserError
from quorate.replica.witness.places import place_doubts
from quorate.training.collective import checks, late_notes, share
from quorate.training.collective.contrasting import contrasting_of
from quorate.training.collective.identity import compare, identity
from quorate.training.collective.member import Member
from quorate.training.collective.status import Status
from quorate.training.crew import Crew
from quorate.training.drive import Ready
from quorate.training.loop import Loop, Updates
from quorate.training.optimizing.update import Applied
from quorate.training.saved_state import shared
from quorate.training.state import State
from quorate.training.stop import Stops

OPEN, STEP = "open", "step"  # kinds of records


@contextmanager
def leading(
    loop: Loop,
    crew: Crew,
    source: Source,
    facts: dict[str, Any],
    stops: Stops,
    say: Callable[[str], None],
) -> Iterator[Loop]:
    """Open a loop on all ranks inside the block, and end all ranks but rank 0 afterwards.

    Raises:
        UserError: a rank computes different gradients, or has different settings or data.
        RankError: a rank is lost.
    """
    state, plan, rank_group = loop.state, loop.plan, crew.rank_group
    assert rank_group is not None
    ranks = rank_group.meet(crew.master_device, crew.timeout_s)
    state.user_changes.look()
    state.user_changes.refuse()
    with ExitStack() as stack:
        stack.callback(_leave, crew, rank_group, state, stops, say)
        ranks.monitor.on_stop = partial(_asked, stops)
        with rank_group.naming(), _in_step(ranks):
            shared = share.Sender(ranks)
            opened = _opened(loop, crew, source, facts, shared)
            member = stack.enter_context(closing(opened))
            ranks.monitor.sheet = member.sheet
            ranks.monitor.on_lost = partial(_lost, stops, member)
            identities = ranks.gather(identity(member, source, crew))
            saves = state.save_with(ranks, say, rank_group.naming)
            if (path := crew.recipe.run_dir.path) and saves is not None and saves.are_by_all:
                saves.rehearse(Path(path))
        rank_group.have_met()
        places: list[str] = []
        if rank_group.is_of_torchrun:
            places = place_doubts(state.model, crew.recipe.loss)
        compare(identities, places)
        for doubt in places:
            crew.replicas.notes.doubt(doubt)
        if (factor := member.slowest_factor(plan.shards)) > 1:
            say(
                f"{plan.shards} shards on {ranks.size} ranks: the busiest rank computes "
                f"{factor:.2f} times an equal share; a power of two for shards or ranks gives 1"
            )
        if (order := rank_group.native_order) is not None:
            crew.replicas.notes.doubt(order)
        state.user_changes.settle()
        between = crew.replicas.between(state)
        rests = between.begin, between.end

        def ask(job: SpotCheck, _patience_s: float) -> Mapping[int, SpotCheckResult]:
            with rank_group.naming(), _in_step(ranks):
                return checks.ask(ranks, member, job)

        spot_checks = crew.spot_checks(state, source, ask)
        updates = Updates(state, source, crew, loop.last_step, say, rests, spot_checks)
        lead = _Lead(member, rank_group, ranks, updates, stops, shared)
        stops.begin()
        with closing(updates.reports(lead.updates(), lead)) as reports:
            yield loop._replace(transport=Status(ranks.monitor), reports=reports)


@contextmanager
def _in_step(ranks: RankControl) -> Iterator[None]:
    """Break off if the block raises: the other ranks wait for an exchange, not for a record."""
    try:
        yield
    except BaseException:
        ranks.break_off()
        raise


def _opened(
    loop: Loop, crew: Crew, source: Source, facts: dict[str, Any], shared_values: share.Sender
) -> Member:
    """Send the state to all ranks, and return the ``Member`` of rank 0.

    Raises:
        UserError: a rank has a different model.
    """
    state, ranks = loop.state, shared_values.ranks
    optimizer = state.optimizer_of_ranks
    given = shared(state, facts, moments=not optimizer.is_sharded)
    record: dict[str, Any] = {
        "kind": OPEN,
        "plan": loop.plan.to_json(),
        "steps": [state.global_step, loop.last_step],
        "computing": crew.replicas.computing.decided,
        "state": share.header(given, state),
    }
    values = state.user_changes.model_changes.shared
    shared_values.put(values, record)
    ranks.tell(record)
    if misfits := [text for text in ranks.gather("") if text]:
        raise UserError(misfits[0])
    share.send(ranks, given, state)
    if optimizer.is_sharded:
        optimizer.scatter()
    member = Member(
        ranks,
        state,
        partial(crew.replicas.alone, state, crew.master_device),
        source,
        range(state.global_step, loop.last_step),
        contrasting=contrasting_of(ranks, crew, state, source),
        loader_workers=crew.recipe.loading.processes,
        threads=crew.recipe.workers.threads,
    )
    shared_values.send()
    member.read(values)
    return member


def _asked(stops: Stops, why: str) -> None:
    """Request a stop because a rank has received a signal to end."""
    if stops.exit_code is None:
        stops.exit_code = STOP_CODE
    stops.ask(why)


def _lost(stops: Stops, member: Member, why: str) -> None:
    """Stop the loop, and interrupt a wait of the main thread for a shard: a rank is lost."""
    stops.ask(why)
    member.leave(RankError(why))


def _leave(
    crew: Crew, rank_group: RankGroup, state: State, stops: Stops, say: Callable[[str], None]
) -> None:
    """Gather the state on rank 0, and end all other ranks."""
    is_whole = False

    def take_all() -> None:
        nonlocal is_whole
        state.leave_ranks()
        is_whole = True

    if state.update.under_way and rank_group.ranks is not None:
        # An error in the middle of an update, maybe on rank 0 alone: ranks wait for an exchange,
        # and not for the record of the end.
        rank_group.ranks.break_off()
    try:
        rank_group.leave(take_all, stops.exit_code or 0)
    except RankError as error:
        say(f"{error}: resume from the newest checkpoint")
    state.saves = None
    if not is_whole:
        state.update.under_way = True  # the state of the lost ranks is missing
    crew.stay_alone(
        "this training loop computes on towers (threads), because the ranks ended with the first "
        "loop"
    )


class _Lead:
    """The steps of a loop on rank 0."""

    begun_at: float | None = None

    def __init__(
        self,
        member: Member,
        rank_group: RankGroup,
        ranks: RankControl,
        updates: Updates,
        stops: Stops,
        shared_values: share.Sender,
    ) -> None:
        self._rank_group = rank_group
        self._state = state = updates.state
        self.first_step = state.global_step
        self.reason = "all steps are done"
        self._member, self._ranks, self._updates, self._stops = member, ranks, updates, stops
        self._groups: list[dict[str, Any]] | None = None  # last sent to all ranks, if any
        self._mark = share.mark(state)
        self._optimizer = state.optimizer_of_ranks
        self._optimizer.note_state()
        self._sent_changes = state.user_changes.model_changes.number
        self._shared = shared_values

    def updates(self) -> Iterator[tuple[Ready, Applied]]:
        """Yield the updates up to the last step, or up to a request to stop."""
        state = self._state
        while state.global_step < self._updates.last_step:
            with self._rank_group.naming():
                self._ranks.require_all()  # a lost rank also requests a stop: raise the error first
            if self._stops.reason is not None:
                self.reason = self._stops.reason
                break
            yield self._made(state.global_step)
        with self._rank_group.naming():
            late_notes.ask(self._ranks, self._updates.crew.replicas.notes)

    def _made(self, step: int) -> tuple[Ready, Applied]:
        state, member = self._state, self._member
        record: dict[str, Any] = {"kind": STEP, "step": step}
        self._optimizer.require_same_state()
        if (order := member.exchange.seen_order()) is not None:
            record["buckets"] = order
            member.exchange.order = order
        if (groups := share.groups(state)) != self._groups:
            record["groups"] = self._groups = groups
        model_changes = state.user_changes.model_changes
        is_changed = state.visits.has_come and share.mark(state) != self._mark
        if is_changed or model_changes.number != self._sent_changes:
            record["amendments"] = model_changes.to_json()
            self._sent_changes = model_changes.number
        self._shared.put(model_changes.shared, record)
        _, end_rest = self._updates.rests

        def tell(own: StepContribution) -> StepContribution:
            # Check the parameters before the contribution of this rank is sent: afterwards all
            # ranks make the update, and ranks of a host may share the memory of the parameters.
            end_rest()
            return own

        try:
            with self._rank_group.naming():
                if self._optimizer.is_lent:
                    self._optimizer.scatter()  # user code may have changed the state
                self._ranks.tell(record)
                if "amendments" in record:
                    for value in share.values(state):
                        for rank in range(1, self._ranks.size):
                            self._ranks.swap([(rank, value.contiguous())], [])
                self._shared.send()
                member.read(model_changes.shared)
                parts = member.parts(step, tell=tell, hear=self._hear)
                applied = member.applied(parts, step, step + 1)
        except RankError:
            raise
        except BaseException as error:
            # All ranks raise the error of a shard, and wait for the next record. Any other error
            # leaves ranks in the middle of an exchange.
            if state.update.under_way or not isinstance(error, Exception):
                self._ranks.break_off()
            if not state.update.under_way:
                member.restore()
            raise
        ready = Ready(step, [], tuple(range(member.shards_of(step))), staleness=0)
        for each in applied.shares:
            state.tally.applied(each.worker, 0)
        self._updates.took(ready, applied)
        state.visits.updated(self._take_mark)
        self._optimizer.note_state()
        return ready, applied

    def _take_mark(self) -> None:
        self._mark = share.mark(self._state)

    def _hear(self, rank: int, handed: StepContribution) -> None:
        """Handle the parts of a rank's contribution besides sums: spans, a stop, notes."""
        self._member.take_spans(rank, handed)
        if handed.stop is not None:
            _asked(self._stops, f"rank {rank}: {handed.stop}")
        for note in handed.notes:
            self._updates.crew.replicas.notes.put(note, f"rank {rank}")
