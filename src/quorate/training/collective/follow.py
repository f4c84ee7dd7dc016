"""The ranks other than 0: run the script up to the training loop, and then follow rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from quorate.coordination.plan import from_json
from quorate.data.source import Source, length
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.process_group import refused_call
from quorate.engines.processes.script_as_worker import warnings_of_script
from quorate.engines.processes.worker import here
from quorate.errors import NotFiniteError, QuorateError, RankError, UserError
from quorate.machine.devices import has_streams
from quorate.machine.standard_streams import Steady, flush_standard_streams
from quorate.services.display.uncaught import told_torchrun
from quorate.training.collective import share
from quorate.training.collective.identity import identity
from quorate.training.collective.rank_worker import RankWorker
from quorate.training.state import State
from quorate.training.stop import end_by_signals, watch_for_sigterm
from quorate.training.worker_group import WorkerGroup

MakeState = Callable[[Source], State]


def follow(workers: WorkerGroup, dataset: Any, make_state: MakeState) -> NoReturn:
    """Carry out the calls of rank 0, and end this process after the last call.

    Nothing of the script runs afterwards: code after a training loop runs on rank 0 alone.
    """
    assert workers.rank_group is not None
    code, why = 1, "its loop is over"
    try:
        end_by_signals()
        code = _follow(workers, dataset, make_state)
    except RankError as error:
        # A rank 0 that has started this process prints its own line. If this process fails while
        # starting, the line of rank 0 ends with the hidden output, which must say why.
        process, ranks = here(), workers.rank_group.ranks
        prints = ranks is None or ranks.monitor.prints_end
        if prints if process is None else process.hides_output:
            print(error.line, file=Steady(sys.stderr))
        why = str(error)
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
    workers.rank_group.part(why)
    flush_standard_streams()
    os._exit(code)


def _follow(workers: WorkerGroup, dataset: Any, make_state: MakeState) -> int:
    """Follow rank 0 until the last call, and return the exit code for this process."""
    assert workers.rank_group is not None
    ranks = workers.rank_group.meet(workers.master_device, workers.timeout_s)
    watch_for_sigterm(ranks.monitor.request_stop)
    with ExitStack() as stack:
        follower = _Follower(workers, dataset, make_state, ranks, stack)
        ranks.methods = {"open": follower.open, "take": follower.take, "join": follower.join}
        code = ranks.obey()
    if has_streams(workers.master_device):
        # Transfers from this rank to rank 0 may not have run yet, and would end with this process.
        torch.accelerator.synchronize(workers.master_device)
    return code


@dataclass(eq=False)
class _Follower:
    """The methods that rank 0 calls on another rank before the first step, and for each update."""

    workers: WorkerGroup
    dataset: Any  # the data of this rank
    make_state: MakeState
    ranks: RankControl  # the connections to all ranks
    stack: ExitStack  # ends the worker of this rank

    def open(
        self, plan: dict[str, Any], decided: dict[str, Any], model: dict[str, list[Any]]
    ) -> None:
        """Make the state of this rank, and compare the model with rank 0's.

        Raises:
            UserError: the data or the environment differ from rank 0's.
            SystemExit: some rank's model differs from rank 0's; rank 0 prints the difference.
        """
        workers, loading, rank = (
            self.workers,
            self.workers.config.loading,
            self.ranks.rank,
        )
        own_plan = from_json(plan, loading.order, loading.sampling)
        if (rows := length(self.dataset)) != own_plan.rows:
            raise UserError(
                f"rank {rank} has another dataset",
                got=f"{rows} rows",
                expected=f"{own_plan.rows} as on rank 0",
                fix="give every rank the same data",
            )
        self._source = Source(self.dataset, own_plan, loading.collate, loading.augment)
        self._state = state = self.make_state(self._source)
        if decided["compile"] != workers.replicas.computing.compile:
            raise UserError(
                "compile",
                got=f"{workers.replicas.computing.compile} on this rank",
                expected=f"{decided['compile']} as on rank 0",
                fix="install a compiler on every host, or on none",
            )
        workers.replicas.compute_as(decided)
        state.average = None  # rank 0 alone averages parameters
        for update in state.phases.updates.values():
            update.leave_average()
            update.leave_schedule()
        if any(self.ranks.gather(share.misfit(rank, model, state))):
            raise SystemExit(2)

    def take(self, described: dict[str, list[Any]], record: dict[str, Any]) -> None:
        """Receive the state of rank 0."""
        share.take(self.ranks, described, record, self._state)

    def join(self, steps: tuple[int, int], values: dict[str, Any] | None) -> None:
        """Become a worker for the steps of the loop, and let rank 0 compare all ranks."""
        workers, ranks = self.workers, self.ranks
        made = RankWorker(ranks, workers, self._state, self._source, range(*steps))
        self._worker = worker = self.stack.enter_context(closing(made))
        ranks.methods["update"] = self._update
        ranks.monitor.sheet = worker.sheet
        worker.take_values(values)
        ranks.gather(identity(worker, self._source, workers))
        if (process := here()) is not None:
            for line in warnings_of_script():
                workers.replicas.notes.add(line)
            process.show()  # so far rank 0 shows the output only if this process fails
        worker.settle()

    def _update(self, step: int, *news: Any) -> None:
        """Make the update of a step; after an error of all ranks, return without an update."""
        try:
            _, applied = self._worker.apply(step, self._worker.sums(step, *news))
        except RankError:
            raise
        except NotFiniteError:  # a gradient in a closure was not finite; all ranks raise
            return
        except Exception as error:
            if error is not self.ranks.raised:
                raise  # maybe on this rank alone: all ranks notice the end of this process
            self._worker.restore()
            return  # all ranks have raised the same error: rank 0 decides how to go on
        if applied.not_finite is None:
            self._state.global_step = step + 1
