"""Fit: a training loop, and what goes on beside it.

Checkpoints, evaluations, summaries, the display, signals and callbacks: all of it between two
updates, or in threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.coordination.plan import Plan
from quorate.replica.totals import Totals
from quorate.services import Service
from quorate.services.checkpoints.files import Contents
from quorate.services.checkpoints.saver import Checkpoints, Outcome, Policy
from quorate.services.device_use import Gauges
from quorate.services.display.display import Display, metrics
from quorate.services.display.worker_table import WorkerTable
from quorate.services.metrics_log import MetricsLog
from quorate.services.report import Report
from quorate.services.supervisor import Supervisor
from quorate.services.tensorboard.summaries import Summaries
from quorate.training.callbacks import Callback, Run
from quorate.training.saved_state import contents
from quorate.training.state import State
from quorate.training.stop import Signals, Stops
from quorate.training.validation import Best, Evaluations
from quorate.transports import Transport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Loop(NamedTuple):
    """A training loop that is prepared."""

    state: State
    plan: Plan
    last_step: int
    saved: tuple[int, Path] | None  # the newest checkpoint: its step and directory
    transport: Transport | None  # None: there is nothing to do
    reports: Iterator[Report]


class Beside(NamedTuple):
    """What is wanted beside training; see ``Trainer``."""

    policy: Policy
    summary_every_s: float | None
    max_time_s: float | None
    callbacks: Sequence[Callback]
    totals: Totals


class Validation(NamedTuple):
    """What is evaluated, and when; see ``Trainer.fit``."""

    evaluate: Callable[[Stops], dict[str, float] | None]  # None: it was stopped
    epochs: int
    steps: int | None
    best: Best | None


class Fit:
    """One call of ``Trainer.fit``.

    Args:
        run: the trainer, for callbacks.
        beside: what is wanted.
        validation: likewise, if there is a validation set.
        facts: what a checkpoint is to say of the run.
        screen: shows the run; closed by the caller.
    """

    def __init__(
        self,
        run: Run,
        beside: Beside,
        validation: Validation | None,
        facts: Callable[[State], dict[str, Any]],
        screen: Display,
    ) -> None:
        self.saved: tuple[int, Path] | None = None  # the newest checkpoint
        self._run = run
        self._beside = beside
        self._validation = validation
        self._facts = facts
        self._screen = screen
        self._stops = Stops()
        self._saver: Checkpoints | None = None
        self._log: MetricsLog | None = None
        self._log_failed = False
        self._summaries: Summaries | None = None

    @property
    def summaries(self) -> SummaryWriter | None:
        """Where callbacks put images and text."""
        return None if self._summaries is None else self._summaries.writer

    def train(self, prepared: Callable[[Stops], AbstractContextManager[Loop]]) -> None:
        """Train to the end, or until someone asks for a stop. Raises as ``Trainer.fit`` says."""
        limit_s = self._beside.max_time_s
        with ExitStack() as stack:
            # 1. Who may ask for a stop or a save: from here on nothing is lost.
            if self._run.run_dir is not None:
                saver = Checkpoints(self._run.run_dir, self._beside.policy)
                self._saver = stack.enter_context(closing(saver))
            signals = stack.enter_context(Signals(self._stops, self._ask_for_a_save))
            stack.enter_context(self._stops.after(limit_s, f"max_time_s={limit_s} is over"))
            # 2. The loop; and what ends, in this order, before it does.
            loop = stack.enter_context(prepared(self._stops))
            self.saved, signals.under_way = loop.saved, True
            if self._run.run_dir is not None:
                log = MetricsLog(self._run.run_dir, loop.state.global_step)
                self._log = stack.enter_context(closing(log))
            stack.push(self._tell_stopped)
            supervisor = stack.enter_context(self._supervisor(loop))
            stack.push(lambda _kind, raised, _trace: self._save_at_end(loop.state, raised))
            # 3. Training.
            for callback in self._beside.callbacks:
                callback.started(self._run)
            self._evaluate_if_due(loop, supervisor)  # it may have been cut off
            for report in loop.reports:
                self._screen.update(report)
                supervisor.updated(report)
                if self._log is not None:
                    self._logged(self._log.update, report)
                for callback in self._beside.callbacks:
                    callback.updated(report)
                self._evaluate_if_due(loop, supervisor)
                self._save_if_due(loop.state)
        signals.leave()

    # --- evaluations ------------------------------------------------------------------------------

    def _evaluate_if_due(self, loop: Loop, supervisor: Supervisor) -> None:
        state, wanted = loop.state, self._validation
        n, per_epoch = state.global_step, loop.plan.steps_per_epoch
        if wanted is None or state.evaluated_at == n or self._stops.reason is not None:
            return
        if not Evaluations(per_epoch, wanted.epochs, wanted.steps).are_due(n, loop.last_step):
            return
        values = wanted.evaluate(self._stops)
        if values is None:
            return
        state.evaluated_at = n
        if self.saved is not None and self.saved[0] == n:
            self.saved = None  # that one does not know of this
        which = "" if state.average is None else " of the averaged weights"
        epoch, rest = divmod(n, per_epoch)
        when = f"step {n:,}" if rest else f"epoch {epoch}"
        self._screen.say(f"{when}: validation{which}  {metrics(values)}")
        if self._log is not None:
            self._logged(self._log.evaluation, n, values)
        supervisor.evaluated(n, values)
        for callback in self._beside.callbacks:
            callback.evaluated(n, values)
        if wanted.best is not None and wanted.best.is_better(values, state.best):
            state.best = wanted.best.entry(values, n)
            if self._saver is not None:
                self._saver.save(self._contents(state, self._saver))

    # --- checkpoints ------------------------------------------------------------------------------

    def _ask_for_a_save(self) -> None:
        if self._saver is not None:
            self._saver.ask()

    def _save_if_due(self, state: State) -> None:
        if self._saver is None:
            return
        self._note(self._saver.outcomes())
        if self._saver.is_due(state.global_step):
            self._saver.save(self._contents(state, self._saver))

    def _contents(self, state: State, saver: Checkpoints) -> Contents:
        return contents(state, self._facts(state), saver.spare)

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        """Tell what became of saves in the background."""
        for n, path, error in outcomes:
            if path is None:
                self._screen.say(f"step {n:,} is not saved, training goes on: {error}")
                continue
            self.saved = (n, path)
            for callback in self._beside.callbacks:
                callback.saved(n, path)

    def _save_at_end(self, state: State, raised: BaseException | None) -> None:
        if self._saver is None or state.global_step == 0:
            return
        try:
            self._saver.finish()
            self._note(self._saver.outcomes())
            if state.update.under_way:
                self._screen.say(
                    "nothing saved: an update was cut off, and the parameters are half of it"
                )
                return
            if self.saved is None or self.saved[0] != state.global_step:
                path = self._saver.write(self._contents(state, self._saver))
                self._note([Outcome(state.global_step, path, "")])
        except Exception as error:
            if raised is None:
                raise
            # The first exception is the one that is raised.
            self._screen.say(f"step {state.global_step:,} is not saved: {error}")
        else:
            assert self.saved is not None
            self._screen.say(f"saved step {state.global_step:,} to {self.saved[1]}")

    # --- services, metrics.jsonl, callbacks -------------------------------------------------------

    def _supervisor(self, loop: Loop) -> Supervisor:
        services: list[Service] = []
        run_dir, every_s = self._run.run_dir, self._beside.summary_every_s
        if loop.transport is not None:
            services.append(WorkerTable(self._screen, loop.transport.status, Gauges()))
            if run_dir is not None and every_s is not None:
                self._summaries = Summaries(
                    run_dir,
                    every_s,
                    status=loop.transport.status,
                    gauges=Gauges(),
                    global_step=loop.state.global_step,
                    finished=self._beside.totals.finished,
                )
                services.append(self._summaries)
        return Supervisor(services, self._screen.say)

    def _logged(self, write: Callable[..., None], *record: Any) -> None:
        try:
            write(*record)
        except OSError as error:
            if not self._log_failed:
                self._screen.say(f"metrics.jsonl is not written, training goes on: {error}")
            self._log_failed = True

    def _tell_stopped(
        self,
        _kind: type[BaseException] | None,
        raised: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        reason = self._stops.reason or "all steps are done"
        if raised is not None:
            reason = f"{type(raised).__name__}: {raised}"
        for callback in self._beside.callbacks:
            try:
                callback.stopped(reason)
            except Exception as error:
                if raised is None:
                    raise
                self._screen.say(f"a callback failed too: {type(error).__name__}: {error}")
