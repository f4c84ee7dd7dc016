"""The ranks other than 0: run the script up to the training loop, and then follow rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, NoReturn

import torch

from quorate.coordination.plan import Plan, from_json
from quorate.data.source import Source, length
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.collective.rank_group import END
from quorate.engines.collective.step_contribution import StepContribution
from quorate.engines.process_group import refused_call
from quorate.engines.processes.worker import here
from quorate.errors import NotFiniteError, QuorateError, RankError, UserError
from quorate.machine.devices import has_streams
from quorate.machine.standard_streams import Steady, flush_standard_streams
from quorate.replica.witness.between import Between
from quorate.services.display.uncaught import told_torchrun
from quorate.training.collective import share
from quorate.training.collective.asked import Asked, end_by_signals
from quorate.training.collective.checks import CHECK, check_asked
from quorate.training.collective.contrasting import contrasting_of
from quorate.training.collective.identity import identity
from quorate.training.collective.late_notes import NOTES, gathered
from quorate.training.collective.lead import OPEN, STEP
from quorate.training.collective.member import Member
from quorate.training.collective.saves import KINDS as SAVES
from quorate.training.crew import Crew
from quorate.training.optimizing.sliced_optimizer import GATHER, SCATTER, SlicedOptimizer
from quorate.training.state import State

MakeState = Callable[[Source], State]


def follow(crew: Crew, dataset: Any, make_state: MakeState) -> NoReturn:
    """Carry out the records of rank 0, and end this process after the last record.

    Nothing of the script runs afterwards: code after a training loop runs on rank 0 alone.
    """
    assert crew.rank_group is not None
    code, why = 1, "its loop is over"
    try:
        end_by_signals()
        code = _follow(crew, dataset, make_state)
    except RankError as error:
        named = crew.rank_group.named(error)
        if here() is None:  # else rank 0 has started this process, and prints the line
            print(named.line, file=Steady(sys.stderr))
        why = str(named)
    except QuorateError as error:
        code, why = 2 if isinstance(error, UserError) else 1, str(error)
        if isinstance(error, UserError) and (worker := here()) is not None:
            worker.refuse(error)  # rank 0 prints the message
        else:
            print(f"quorate: {error}", file=Steady(sys.stderr))
    except SystemExit as error:  # another rank of this host prints the reason
        code, why = error.code if isinstance(error.code, int) else 1, "ranks do not fit together"
    except BaseException as error:  # the edge of the process
        if (refusal := refused_call(error)) is not None:  # rank 0 is refused too, and prints a line
            code, why = refusal.exit_code, str(refusal)
            told_torchrun(refusal.line)  # torchrun may end rank 0 before rank 0 prints the line
        else:
            sys.excepthook(*sys.exc_info())
            why = type(error).__name__
    crew.rank_group.part(why)
    flush_standard_streams()
    os._exit(code)


def _follow(crew: Crew, dataset: Any, make_state: MakeState) -> int:
    """Follow rank 0 until the last record, and return the exit code for this process."""
    assert crew.rank_group is not None
    ranks = crew.rank_group.meet(crew.master_device, crew.timeout_s)
    asked = Asked(ranks.monitor.request_stop)
    record = ranks.hear()
    if record["kind"] == END:
        return int(record["code"])
    assert record["kind"] == OPEN
    loading = crew.recipe.loading
    plan = from_json(record["plan"], loading.order, loading.sampling)
    if (rows := length(dataset)) != plan.rows:
        raise UserError(
            f"rank {ranks.rank} has another dataset",
            got=f"{rows} rows",
            expected=f"{plan.rows} as on rank 0",
            fix="give every rank the same data",
        )
    state, source = _opened(crew, dataset, plan, record, make_state)
    optimizer = state.optimizer
    misfits = ranks.gather(share.misfit(ranks, record["state"], state))
    if any(misfits):  # rank 0 prints the first misfit
        return 2
    share.take(ranks, record["state"], state)
    if isinstance(optimizer, SlicedOptimizer) and optimizer.is_sharded:
        optimizer.take_part(ranks.hear())
    shared = share.Taker(ranks)
    member = Member(
        ranks,
        state,
        partial(crew.replicas.alone, state, crew.master_device),
        source,
        range(*record["steps"]),
        contrasting=contrasting_of(ranks, crew, state, source),
        loader_workers=crew.recipe.loading.processes,
        threads=crew.recipe.workers.threads,
    )
    ranks.monitor.sheet = member.sheet
    with closing(member):
        member.read(shared.take(record))
        ranks.gather(identity(member, source, crew))
        saves = state.save_with(ranks)
        if (worker := here()) is not None:
            for line in worker.found():
                crew.replicas.notes.add(line)
            worker.show()  # so far rank 0 shows the output only if this process fails
        state.user_changes.settle()
        between = crew.replicas.between(state)
        notes = crew.replicas.notes

        def tell(own: StepContribution) -> StepContribution:
            between.end()
            return own._replace(stop=asked.by, notes=notes.take())

        while (record := ranks.hear())["kind"] != END:
            if record["kind"] == GATHER and isinstance(optimizer, SlicedOptimizer):
                optimizer.gather()
            elif record["kind"] == SCATTER and isinstance(optimizer, SlicedOptimizer):
                optimizer.take_part(record)
            elif record["kind"] == CHECK:
                check_asked(record, ranks, member, state, source)
            elif record["kind"] == NOTES:
                gathered(ranks, notes.take())
            elif record["kind"] in SAVES and saves is not None:
                saves.hear(record)
            elif record["kind"] == STEP:
                _step(ranks, state, member, record, shared, between, tell)
    if has_streams(crew.master_device):
        # Transfers from this rank to rank 0 may not have run yet, and would end with this process.
        torch.accelerator.synchronize(crew.master_device)
    return int(record["code"])


def _opened(
    crew: Crew, dataset: Any, plan: Plan, record: dict[str, Any], make_state: MakeState
) -> tuple[State, Source]:
    source = Source(dataset, plan, crew.recipe.loading.collate, crew.recipe.loading.augment)
    state = make_state(source)
    decided = record["computing"]
    if decided["compile"] != crew.replicas.computing.compile:
        raise UserError(
            "compile",
            got=f"{crew.replicas.computing.compile} on this rank",
            expected=f"{decided['compile']} as on rank 0",
            fix="install a compiler on every host, or on none",
        )
    crew.replicas.compute_as(decided)
    state.average = None  # rank 0 alone averages parameters
    state.update.leave_average()
    state.update.leave_schedule()
    return state, source


def _step(
    ranks: RankControl,
    state: State,
    member: Member,
    record: dict[str, Any],
    shared: share.Taker,
    between: Between,
    tell: Callable[[StepContribution], StepContribution],
) -> None:
    """Make the update of a step; after an error of all ranks, return without an update."""
    if "buckets" in record:
        member.exchange.order = record["buckets"]
    if "groups" in record:
        share.take_groups(state, record["groups"])
    if "amendments" in record:
        share.take_changes(ranks, record["amendments"], state)
    member.read(shared.take(record))
    step = record["step"]
    between.begin()
    try:
        parts = member.parts(step, tell=tell)
        applied = member.applied(parts, step, step + 1)
    except RankError:
        raise
    except NotFiniteError:  # a gradient in a closure was not finite; all ranks raise
        return
    except Exception as error:
        if error is not member.raised:
            raise  # maybe on this rank alone: all ranks notice the end of this process
        member.restore()
        return  # all ranks have raised the same error: rank 0 decides how to go on
    if applied.not_finite is None:
        state.global_step = step + 1
