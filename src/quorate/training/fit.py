"""Fit: one call of ``Trainer.fit``, a training loop with the services beside the loop.

``Fit.train`` is the whole call in order. The updates themselves are made by ``TrainingLoop``
(``training_loop.py``), an iterator of reports; between two reports this file shows the report,
calls the callbacks, evaluates and saves. Display, worker table, summaries and the writing of
checkpoints have threads of their own.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quorate.coordination.run_event import END, EVALUATION, NOTE, SAVE, SLOW, RunEvent, is_shown
from quorate.engines import Transport
from quorate.errors import ServerError, cut
from quorate.machine.standard_streams import steady
from quorate.machine.text import printable
from quorate.services import Service
from quorate.services.checkpoints.saver import SaveResult, StateSaver
from quorate.services.checkpoints.writer import Contents
from quorate.services.display.display import display, metrics
from quorate.services.display.start_progress import StartProgress
from quorate.services.display.worker_table import WorkerTable
from quorate.services.report import Report
from quorate.services.run_directory.contents import set_log_aside
from quorate.services.run_directory.logs import EventLog, MetricsLog, spent
from quorate.services.run_directory.status import RunStatus
from quorate.services.supervisor import Services
from quorate.services.tensorboard.summaries import Graph, Summaries
from quorate.services.tracing import run_trace
from quorate.training.callbacks import (
    Callback,
    Run,
    check_callbacks,
    defines,
    name_of,
    restore_callbacks,
    states_of,
)
from quorate.training.config import DatasetConfig, StopAfter
from quorate.training.evaluation import evaluate
from quorate.training.notices import once
from quorate.training.probing.checks import graph_of, require_metrics, required_metrics
from quorate.training.saved_state import contents
from quorate.training.setup import TrainingSetup
from quorate.training.state import State
from quorate.training.stop import Signals, Stops
from quorate.training.training_loop import TrainingLoop
from quorate.training.unsaved import UnsavedAttributes
from quorate.training.validation import BestMetric, LossTrend, Validation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


SLOW_LINES_KEPT = 10  # number of lines about slow workers in a checkpoint
# Facts of a checkpoint (``TrainingSetup.facts``) left out of the settings in events.jsonl, because
# they are long, or no settings.
FACTS_NOT_SETTINGS = (
    *("epoch", "account", "doubts", "progress", "row_sample", "order_sha256"),
    *("hyperparameters", "phases", "round"),
)
OUTPUT_FAULT_FILE = "display.txt"  # in the run directory: since when and why no output is shown


class Fit:
    """One call of ``Trainer.fit``.

    Args:
        trainer: the trainer, passed to callbacks.
        setup: the setup of the trainer.
        callbacks: the user's callbacks.
        validation: when to evaluate, and which metric decides the best checkpoint; None without a
            validation set.
        validation_data: the validation set; None if ``validation`` is None.

    Raises:
        SettingError: an argument is not valid, or a callback needs a validation set.
    """

    def __init__(
        self,
        trainer: Run,
        setup: TrainingSetup,
        callbacks: Sequence[Callback],
        validation: Validation | None,
        validation_data: DatasetConfig | None,
    ) -> None:
        self._trainer, self._setup, self._run_dir = trainer, setup, setup.run_dir
        self._callbacks = check_callbacks(callbacks)
        self._validation, self._validation_data = validation, validation_data
        self._required_metrics = required_metrics(setup.workers, validation, self._callbacks)
        self._streams = ExitStack()
        # Writing to the output never raises: training goes on if a pipe closes or a disk is full.
        self._output = self._streams.enter_context(steady())
        self._display = display(self._output)
        self._start_progress = StartProgress(self._display.mention)
        self._is_fault_logged = False
        self._stops = Stops()
        self._saver: StateSaver | None = None
        self._log: MetricsLog | None = None
        self._events = EventLog()
        # Lines on slow workers: for the next line of metrics.jsonl, and the newest for checkpoints.
        self._new_slow_lines: deque[str] = deque()
        self._slow_lines: deque[str] = deque(maxlen=SLOW_LINES_KEPT)
        self._trained_state: State | None = None  # the state of a loop with updates to make
        self._save_fault: str | None = None  # why saves fail at present, as shown to the user
        self._summaries: Summaries | None = None
        self._loss_trend = LossTrend()

    def train(self, data: DatasetConfig, stop_after: StopAfter) -> None:
        """Train to the end, or until a stop is requested. Raises the errors of ``Trainer.fit``."""
        setup, limit_s = self._setup, stop_after.max_time_s
        say, setup.say = setup.say, self.say
        with ExitStack() as stack:
            stack.callback(setattr, setup, "say", say)  # the former function, after ``fit``
            stack.enter_context(setup.reporting_stragglers(self._display.mention))
            # 1. The sources of stops and saves: from here on no request is lost.
            stack.enter_context(run_trace.traced(setup.config.run_dir, self.say))
            if self._run_dir is not None:
                saver = StateSaver(self._run_dir, setup.config.run_dir, setup.lock.renew)
                self._saver = stack.enter_context(closing(saver))
            signals = stack.enter_context(Signals(self._stops, self._request_save))
            stack.enter_context(self._stops.after(limit_s, f"max_time_s={limit_s} has passed"))
            # 2. The loop, the workers, and the callbacks' states from a checkpoint.
            preparing = setup.prepare_loop(data, stop_after, self._stops, self._start_progress.at)
            loop = stack.enter_context(preparing)
            graph = self._probe_model(loop) if loop.has_updates else None
            reports = stack.enter_context(loop.started())
            restore_callbacks(self._callbacks, loop.state.callbacks_saved)
            if self._has_nothing_to_do(loop):  # the run directory stays as it is: no log is opened
                stack.push(self._call_stopped)
                self._name_callbacks_without_updates()
                for callback in self._callbacks_with("started"):
                    callback.started(self._trainer)
                return
            # 3. The services, and the callbacks' ``started``.
            signals.has_step_to_finish = True  # until here the first signal raises at once
            loop.state.callbacks_saved = {}  # restored: a later fit must not restore them again
            services = self._open_services(loop, graph, stack)
            first = loop.state.global_step + 1
            self._trained_state = loop.state
            run_trace.begun(loop.state.global_step)
            for callback in self._callbacks_with("started"):
                callback.started(self._trainer)
            self._evaluate_if_due(loop, services)  # of the checkpoint's step, if it is missing
            # 4. The updates. Every call of user code in this block is announced before.
            stack.enter_context(loop.state.model_edits.user_code_announced())
            unsaved = UnsavedAttributes(self._callbacks, loop.state)
            self._start_progress.at(partial(_reason_to_wait, loop.transport))
            for report in reports:
                if report.global_step == first:
                    if self._saver is not None:
                        loop.state.phases.save()  # raises now if the state cannot be saved
                    self._start_progress.close()
                with run_trace.after_update(report):
                    self._show(report, services)
                    for callback in self._callbacks_with("updated"):
                        callback.updated(report)
                    self._evaluate_if_due(loop, services)
                    if self._saver is not None:
                        is_last = report.global_step == report.last_step
                        unsaved.updated(is_last=is_last or self._stops.reason is not None)
                    self._save_if_due(loop.state)
            if (warning := self._loss_trend.warning()) is not None:
                self.say(warning)
        # After the state is saved and all services are closed: Ctrl-C ends the script here.
        signals.raise_received()

    def say(self, line: str) -> None:
        """Show a line to the user, and log the line.

        Args:
            line: plain text, or a ``RunEvent``: text with a kind, perhaps for the log alone.
        """
        if is_shown(line):
            self._display.say(line)
        self._events.add(line)

    def close(self) -> None:
        """End the display; leave the last lines on the screen."""
        self._start_progress.close()
        try:
            self._display.close()
            self._log_output_fault("the end")
        finally:
            self._streams.close()

    @property
    def summaries(self) -> SummaryWriter | None:
        """The TensorBoard writer for images and text of callbacks."""
        return None if self._summaries is None else self._summaries.writer

    def _open_services(self, loop: TrainingLoop, graph: Graph | None, stack: ExitStack) -> Services:
        """Open the services beside a loop, to be closed by ``stack``.

        When the stack unwinds, the state is saved first. Then the services' threads end, callbacks
        receive ``stopped``, the end is logged, and the logs are closed.
        """
        if self._run_dir is not None:
            self._open_logs(self._run_dir, loop, stack)
        status = RunStatus(self._run_dir, loop.last_step, self._setup.lock.renew)
        status.begun(loop.state.global_step)
        stack.push(lambda _kind, raised, _trace: self._log_end(loop, status, raised))
        stack.push(self._call_stopped)
        services = stack.enter_context(self._make_services(loop, graph))
        stack.push(lambda _kind, raised, _trace: self._save_at_end(loop.state, raised))
        return services

    def _probe_model(self, loop: TrainingLoop) -> Graph | None:
        """Check that an evaluation has the required metrics, before workers are started.

        Returns:
            The graph of the model for TensorBoard; None without summaries.
        """
        workers, state = self._setup.workers, loop.state
        self._start_progress.at(
            "computing a shard once more, for the graph of the model and the names of metrics"
        )
        if self._validation_data is not None:
            require_metrics(workers, state, self._validation_data, self._required_metrics)
        if self._run_dir is None or workers.config.run_dir.summary_every_s is None:
            return None
        return graph_of(workers, state, loop.source)

    def _show(self, report: Report, services: Services) -> None:
        """Show a report on the display, in summaries and in metrics.jsonl."""
        self._display.update(report)
        self._log_output_fault(f"step {report.global_step:,}")
        services.updated(report)
        if self._log is not None:
            named = [self._new_slow_lines.popleft() for _ in range(len(self._new_slow_lines))]
            self._slow_lines += named
            self._log.update(report, named)

    def _has_nothing_to_do(self, loop: TrainingLoop) -> bool:
        """Return whether all updates and the last evaluation were made."""
        n = loop.state.global_step
        return n >= loop.last_step and (self._validation is None or loop.state.evaluated_at == n)

    def _name_callbacks_without_updates(self) -> None:
        """Name the callbacks that receive no update, because all updates were made before.

        Callbacks with a ``load_state_dict`` are not named: they have their state again.
        """
        names = [
            name_of(callback)
            for callback in self._callbacks
            if not defines(callback, "load_state_dict")
            and any(defines(callback, method) for method in ("updated", "evaluated", "saved"))
        ]
        if names and self._run_dir is not None:
            once(self.say)(
                f"callbacks that receive no update, because an earlier run made all updates of "
                f"this fit: {', '.join(names)}; read the updates in metrics.jsonl, or give the "
                "callback a state_dict() and a load_state_dict()"
            )

    def _callbacks_with(self, method: str) -> Iterator[Callback]:
        """Yield the callbacks that define a method; each may change the model."""
        for callback in self._callbacks:
            if defines(callback, method):
                self._before_user_code()
                yield callback

    def _before_user_code(self) -> None:
        """Prepare the state for user code: servers may hold the newest parameters."""
        if self._trained_state is not None:
            self._trained_state.model_edits.before_user_code()

    # --- evaluations ------------------------------------------------------------------------------

    def _evaluate_if_due(self, loop: TrainingLoop, services: Services) -> None:
        """Evaluate the validation set at this step, if due, and save the best checkpoint.

        An evaluation interrupted by a stop leaves no record: a resume evaluates anew.
        """
        state, validation, data = loop.state, self._validation, self._validation_data
        n, per_epoch = state.global_step, loop.plan.steps_per_epoch
        if validation is None or data is None or state.evaluated_at == n:
            return
        if self._stops.reason is not None or not validation.is_due(n, per_epoch, loop.last_step):
            return
        state.model_edits.before_user_code()
        with run_trace.span("evaluation"):
            # averaged=None: the averaged weights, if there are any
            values = evaluate(self._setup, data, None, self._stops, name="validation")
        if values is None:  # stopped before the last row
            return
        state.evaluated_at = n
        for update in state.phases.updates.values():
            update.evaluated(values)
        if self._setup.saved is not None and self._setup.saved[0] == n:
            self._setup.saved = None  # save this step again at the end: with this evaluation
        which = "" if state.average is None else " of the averaged weights"
        epoch, rest = divmod(n, per_epoch)
        when = f"step {n:,}" if rest else f"epoch {epoch}"
        self.say(RunEvent(f"{when}: validation{which}  {metrics(values)}", EVALUATION))
        if validation.best is None and "loss" in values:
            self._loss_trend.add(when, values["loss"])
        if self._log is not None:
            self._log.evaluation(n, values)
        services.evaluated(n, values)
        for callback in self._callbacks_with("evaluated"):
            callback.evaluated(n, values)
        best = None if validation.best is None else BestMetric(validation.best)
        if best is not None and best.is_better(values, state.best):
            state.best = best.entry(values, n)
            if self._saver is not None:
                self._saver.save(self._contents(state, self._saver))

    # --- checkpoints ------------------------------------------------------------------------------

    def _request_save(self) -> None:
        if self._saver is not None:
            self._saver.ask()

    def _save_if_due(self, state: State) -> None:
        if self._saver is None:
            return
        self._report_saves(self._saver.results())
        if self._saver.is_due(state.global_step):
            self._saver.save(self._contents(state, self._saver))

    def _contents(self, state: State, saver: StateSaver) -> Contents:
        """Copy the state for a checkpoint: training changes the state during the save."""
        state.callbacks = states_of(self._callbacks, state.callbacks)
        facts = self._setup.facts(state)
        if self._slow_lines:
            facts["slow"] = [*self._slow_lines]
        with run_trace.span("copying the state"):
            return contents(state, facts, saver.spare)

    def _report_saves(self, results: Sequence[SaveResult]) -> None:
        """Report finished saves: failures to the user, checkpoints to log and callbacks."""
        for n, path, error in results:
            if path is None:
                why = error.partition(": ")[0]  # the path may be a new one each time
                if why != self._save_fault:
                    self.say(f"step {n:,} was not saved, training continues: {error}")
                self._save_fault = why
                continue
            if self._save_fault is not None:
                self.say(RunEvent(f"step {n:,} was saved: checkpoints can be written again", NOTE))
            self._events.add(RunEvent(f"saved step {n:,}", SAVE), saved_step=n)
            self._setup.saved, self._save_fault = (n, path), None
            for callback in self._callbacks_with("saved"):
                callback.saved(n, path)

    def _save_at_end(self, state: State, raised: BaseException | None) -> None:
        """Save the last state, also after an error in user code.

        Args:
            raised: the exception behind the end of the loop, if any. An error of this save is shown
                then, and not raised.
        """
        if self._saver is None or state.global_step == 0:
            return
        try:
            self._saver.finish()
            self._report_saves(self._saver.results())
            if state.update.is_half_made:
                self.say(
                    "no checkpoint was saved: an update was interrupted, and only a part of the "
                    "parameters has new values; resume from the newest checkpoint"
                )
                return
            if self._setup.saved is None or self._setup.saved[0] != state.global_step:
                path = self._saver.write(self._contents(state, self._saver))
                self._report_saves([SaveResult(state.global_step, path, "")])
        except Exception as error:
            if raised is None:
                raise
            self.say(f"step {state.global_step:,} was not saved: {error}")
        else:
            assert self._setup.saved is not None
            self._display.say(f"saved step {state.global_step:,} to {self._setup.saved[1]}")

    # --- services, metrics.jsonl, callbacks -------------------------------------------------------

    def _make_services(self, loop: TrainingLoop, graph: Graph | None) -> Services:
        """Return the services with threads: the worker table and the summaries."""
        services: list[Service] = []
        workers, every_s = self._setup.workers, self._setup.config.run_dir.summary_every_s
        if loop.transport is not None:
            status, slow_workers = loop.transport.status, workers.stragglers.slow_workers
            services.append(
                WorkerTable(self._display, status, slow_workers, tell=self._log_slow_worker)
            )
            if self._run_dir is not None and every_s is not None and self._has_tensorboard():
                self._summaries = Summaries(
                    self._run_dir,
                    every_s,
                    status=status,
                    global_step=loop.state.global_step,
                    finished=workers.replicas.totals.finished,
                    graph=graph,
                )
                services.append(self._summaries)
        return Services(services, self.say)

    def _log_slow_worker(self, line: str) -> None:
        """Log a line on a slow worker in events.jsonl and metrics.jsonl. Called in a thread."""
        self._new_slow_lines.append(line)
        self._events.add(RunEvent(line, SLOW))

    def _open_logs(self, run_dir: Path, loop: TrainingLoop, stack: ExitStack) -> None:
        """Open metrics.jsonl, and begin the events of this fit; ``stack`` closes both."""
        state, renew = loop.state, self._setup.lock.renew
        n, facts = state.global_step, self._setup.facts(state)
        if n == 0:
            set_log_aside(run_dir, self.say)
        workers = None if loop.transport is None else loop.transport.status
        self._log = stack.enter_context(closing(MetricsLog(run_dir, n, self.say, renew, workers)))
        started = f"training starts at step {n:,} of {loop.last_step:,}"
        entries = {
            "command": sys.argv,
            "settings": {
                name: value for name, value in facts.items() if name not in FACTS_NOT_SETTINGS
            },
        }
        say = self._display.say
        self._events.open(run_dir, lambda: state.global_step, started, entries, say, renew)
        stack.callback(self._events.close)

    def _log_end(self, loop: TrainingLoop, status: RunStatus, raised: BaseException | None) -> None:
        """Record how the run ended, and how its workers spent their time."""
        n, reason = loop.state.global_step, self._stops.reason
        outcome, why = status.ended(n, reason, raised)
        more: dict[str, Any] = {"state": outcome}
        if loop.transport is not None:
            more["spent"] = spent(loop.transport.status())
        self._events.add(RunEvent(f"{outcome}: {printable(why)}", END), **more)

    def _has_tensorboard(self) -> bool:
        """Return whether summaries can be written; else name the missing extra to the user."""
        if find_spec("tensorboard") is not None:
            return True
        fix = "pip install 'quorate-torch[tensorboard]', or pass --summary-every-s none"
        once(self.say)(RunEvent(f"no curves in TensorBoard, which is not installed: {fix}", NOTE))
        return False

    def _log_output_fault(self, where: str) -> None:
        """Write a note to the run directory if standard output has failed."""
        if self._output.fault is None or self._is_fault_logged or self._run_dir is None:
            return
        self._is_fault_logged = True
        line = f"standard output: {self._output.fault} (found at {where}); nothing more is shown"
        with suppress(OSError):  # the same disk may be full: training goes on
            self._run_dir.mkdir(parents=True, exist_ok=True)
            with (self._run_dir / OUTPUT_FAULT_FILE).open("a", encoding="utf-8") as note:
                note.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}, training continues\n")

    def _call_stopped(
        self,
        _kind: type[BaseException] | None,
        raised: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Call the callbacks' ``stopped`` with the reason for the end."""
        reason = self._stops.reason or "all steps are done"
        if raised is not None:
            reason = cut(f"{type(raised).__name__}: {raised}")
            with suppress(ServerError):  # the error is already being raised
                self._before_user_code()
        for callback in self._callbacks_with("stopped"):
            try:
                callback.stopped(reason)
            except Exception as error:
                if raised is None:
                    raise
                self.say(f"a callback failed too: {type(error).__name__}: {error}")


def _reason_to_wait(transport: Transport | None) -> str:
    """Return the reason why a starting run waits for its first update."""
    workers = [] if transport is None else transport.status()
    there = sum(worker.phase != "starting" for worker in workers)
    if there == len(workers):
        return "computing the first update"
    return f"starting workers, each of which runs the script: {there} of {len(workers)} are ready"


def save_now(setup: TrainingSetup, state: State) -> Path:
    """Write a checkpoint for ``Trainer.save``, and return its directory.

    Blocks until the checkpoint is on the disk. The caller holds the lock of the run directory.

    Raises:
        SaveError: the checkpoint cannot be written; older checkpoints are unchanged.
    """
    assert setup.run_dir is not None
    with closing(StateSaver(setup.run_dir, setup.config.run_dir, setup.lock.renew)) as saver:
        return saver.write(contents(state, setup.facts(state)))
