"""The trainer: what a user writes."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quorate import checkpoint, engines, rules
from quorate.coordinator import Coordinator, Stop
from quorate.devices import Devices, describe, worker_devices
from quorate.drive import drive
from quorate.errors import CheckpointError, CopyError, LossError, SettingError, UserError
from quorate.feed import Collate, Source, length
from quorate.job import Evaluation, Training
from quorate.loss import Loss
from quorate.optimizer import OptimizerFactory
from quorate.plan import Plan
from quorate.probe import made, probed
from quorate.progress import display, metrics
from quorate.replica import Replica, unchanged
from quorate.report import MetricsLog, Report
from quorate.settings import directory, function, real, setting, whole
from quorate.shard_sum import ShardSum
from quorate.state import State
from quorate.stop import StopSignals
from quorate.streams import Turns
from quorate.transports import Channel, Transport
from quorate.transports.arena import Arena
from quorate.transports.processes import Processes
from quorate.transports.towers import Towers
from quorate.transports.worker import here
from quorate.tree import TreeSum, tree_sum
from quorate.update import Schedule, intra_op_threads

# Whether a training loop was begun in this process: at the first one, worker processes stop.
_begun = False


class Trainer:
    """Trains one model on every device, with the same bits on any number of them.

    Args:
        model: a module, or a function without arguments that makes one. A function is called under
            ``seed``, so that the initial weights follow from it too.
        loss: ``loss(model, batch)`` returns the mean loss over the batch's rows, a scalar tensor,
            or a dict with it under "loss", further scalars under any names (metrics), and "weight"
            where the means are over n tokens or pixels and not over rows. It must use the model it
            is given.
        optimizer: from a list of parameters to a torch optimizer.
        batch_size: rows per update, over all devices.
        shards: V, into how many pieces a batch is cut. The result depends on it, and on the number
            of devices not at all. Default: the number of workers of the first run. More shards on
            one device need less memory (gradient accumulation); more devices than shards are
            substitutes.
        seed: of the order of rows, of dropout, of augmentation.
        run_dir: where state and metrics are saved, and a run that was interrupted is resumed from.
            Without it nothing is written.
        devices: torch devices or their names, as a list or separated by commas. Default: every
            visible GPU, else one CPU worker per core, at most 8.
        workers: how many workers, dealt over the devices in turn. Default: one per entry.
        engine: how workers are reached: "processes" of their own, which run the script again up to
            the first training loop, or "towers", threads of this process. Default: processes for
            several CPU workers of a script; towers in a notebook, at a prompt and on GPUs.
        threads: intra-op threads of each worker. The bits depend on it.
        update: the update rule: "sync", all shards of a step.
        schedule: from the optimizer to a torch LR scheduler, stepped once per update.
        clip_norm: bound on the global norm of the mean gradient.
        ema_decay: average the parameters, with min(ema_decay, (1 + n) / (10 + n)) after n updates.
            The averaged weights are evaluated, and saved beside the plain ones.
        collate: from a list of samples to a batch. Default: torch's.
        loader_workers: processes that load rows, of each worker process or for all towers
            together. Turn it up if decoding is slow.
        worker_timeout_s: a worker process that has been at one shard for so long, and for 3 times
            its usual time, is replaced, and one that has not reached the training loop by then.
            Turn it up if a step or the start of the script may take longer.

    Raises:
        SettingError: a value cannot work; nothing was started.
    """

    def __init__(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        loss: Loss,
        *,
        optimizer: OptimizerFactory,
        batch_size: int,
        shards: int | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        devices: Devices = None,
        workers: int | None = None,
        engine: str | None = None,
        threads: int = 1,
        update: str = "sync",
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        collate: Collate | None = None,
        loader_workers: int = 0,
        worker_timeout_s: float = 300.0,
    ) -> None:
        self._devices = worker_devices(setting("devices", devices), setting("workers", workers))
        self._engine, self._script = engines.chosen(setting("engine", engine), self._devices)
        self._threads = whole("threads", setting("threads", threads), least=1)
        self._rule = rules.parse(setting("update", update))
        self._batch_size = whole("batch_size", batch_size, least=1)
        shards = setting("shards", shards)
        self._shards = None if shards is None else whole("shards", shards, least=1)
        if self._shards is not None and self._shards > self._batch_size:
            raise _too_many_shards(self._shards, f"{self._batch_size} rows of a batch")
        self._seed = whole("seed", setting("seed", seed), least=0)
        self.run_dir = directory("run_dir", setting("run_dir", run_dir))
        self._collate = collate and function(
            "collate", collate, "from a list of samples to a batch"
        )
        self._loader_workers = whole("loader_workers", loader_workers, least=0)
        self._worker_timeout_s = real("worker_timeout_s", worker_timeout_s, above=0)
        self._loss = function("loss", loss, "of a model and a batch")
        self._make_state = partial(
            State,
            shared=self._engine == engines.PROCESSES,
            optimizer=function("optimizer", optimizer, "from parameters to a torch optimizer"),
            schedule=schedule
            and function("schedule", schedule, "from an optimizer to a scheduler"),
            clip_norm=None if clip_norm is None else real("clip_norm", clip_norm, above=0),
            ema_decay=None if ema_decay is None else real("ema_decay", ema_decay, above=0, below=1),
        )
        self._turns = Turns(side_by_side=True)
        self._state: State | None = None
        self._transport: Transport | None = None  # of the loop under way
        self._datasets: dict[str, Any] | None = None  # of the script's first loop, until it begins
        self._channel: Channel | None = None
        self._plan: Plan | None = None
        self._looping = False
        self._log_failed = False
        self._tried = False  # on a training shard
        self._saved: tuple[int, Path] | None = None  # the newest checkpoint: its step and where
        self._say: Callable[[str], None] = logging.getLogger("quorate").warning
        self.model = made(model, self._seed)

    @property
    def global_step(self) -> int:
        """Updates applied so far."""
        return 0 if self._state is None else self._state.global_step

    @property
    def averaged_model(self) -> torch.nn.Module | None:
        """A copy of the model with the averaged weights; None without ``ema_decay``."""
        return None if self._state is None else self._state.averaged_model()

    def fit(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        steps: int | None = None,
        validation: Any = None,
        shuffle: bool = True,
    ) -> None:
        """Train until so many epochs are done, counted from the first run in ``run_dir``.

        Shows progress, writes metrics.jsonl, evaluates ``validation`` and saves the state after
        each epoch, and saves it at the end: also after Ctrl-C or SIGTERM (the step under way is
        finished, then the process leaves as it would have; a second one stops at once), and after
        an exception of the user's code.

        Args:
            dataset: a map-style dataset.
            epochs: passes over it in all.
            steps: updates in all; if given, ``epochs`` does not count.
            validation: a map-style dataset.
            shuffle: whether each epoch has an order of its own; else the dataset's.

        Raises:
            UserError: something cannot work; no update was made.
            KeyboardInterrupt: after Ctrl-C, with everything saved.
            SystemExit: after SIGTERM, likewise.
        """
        self._become_a_worker(dataset, validation)
        if validation is not None:
            length(validation, "validation")
        with ExitStack() as stack:
            screen = stack.enter_context(closing(display()))
            stack.callback(setattr, self, "_say", self._say)
            self._say = screen.say
            stop = stack.enter_context(StopSignals(self.stop))
            updates = self.updates(dataset, epochs=epochs, steps=steps, shuffle=shuffle)
            stack.enter_context(closing(updates))
            stack.callback(self._save_at_end)
            log: MetricsLog | None = None
            for report in updates:
                if log is None and self.run_dir is not None:
                    log = stack.enter_context(MetricsLog(self.run_dir, report.global_step - 1))
                screen.update(report)
                if log is not None:
                    self._logged(log.update, report)
                if stop.received:  # perhaps before there was a step to stop after
                    self.stop(stop.received.name)
                if report.ends_epoch and not stop.received:
                    if validation is not None:
                        self._validate(validation, report, log)
                    self._save_under_way()
        stop.leave()

    def updates(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = True,
    ) -> Generator[Report]:
        """The loop of ``fit`` as a generator: one report per update, and nothing is saved.

        Workers wait while the caller has a report: parameters may be read then. Leaving the loop
        ends them; another loop goes on at the next update. Arguments and errors as for ``fit``.
        """
        self._become_a_worker(dataset)
        plan = self._planned(length(dataset), shuffle)
        last_step = whole("epochs", epochs, least=1) * plan.steps_per_epoch
        if steps is not None:
            last_step = whole("steps", steps, least=1)
        if self._looping:
            raise UserError("a loop over updates is under way; close it before another is begun")
        with ExitStack() as stack:
            self._looping = True
            stack.callback(setattr, self, "_looping", False)
            stack.enter_context(intra_op_threads(self._threads))
            source = Source(dataset, plan, self._collate)
            notes: list[str] = []
            state = self._prepared(source, notes.append)
            for line in (self._arithmetic(plan), *notes):
                self._say(line)
            if state.global_step >= last_step:
                self._say(f"nothing to do: {state.global_step:,} of {last_step:,} updates are done")
                return
            self._transport = stack.enter_context(closing(self._workers(state, source)))
            stack.callback(setattr, self, "_transport", None)
            job = Training(
                source,
                state.parameters,
                range(state.global_step, last_step),
                loader_workers=self._loader_workers,
                threads=self._threads,
            )
            self._channel = stack.enter_context(closing(self._transport.open(job)))
            stack.callback(setattr, self, "_channel", None)
            coordinator = Coordinator(
                shards_of=plan.shards_of,
                first_step=state.global_step,
                last_step=last_step,
                rule=self._rule,
                timeout_s=self._worker_timeout_s,
            )
            yield from self._applied(state, plan, coordinator, last_step)

    def evaluate(self, dataset: Any, *, averaged: bool | None = None) -> dict[str, float]:
        """Weighted means of the loss function's loss and metrics over every row, each once.

        Args:
            dataset: a map-style dataset.
            averaged: whether to use the averaged weights. Default: if there are any.

        Raises:
            UserError: the dataset is empty, its weight is zero, or nothing is averaged.
        """
        rows = length(dataset)
        plan = Plan(
            rows=rows,
            batch_size=min(self._batch_size, rows),
            shards=self._shards or len(self._devices),
            seed=self._seed,
            shuffle=False,
        )
        with ExitStack() as stack:
            stack.enter_context(intra_op_threads(self._threads))
            source = Source(dataset, plan, self._collate)
            state = self._state or self._evaluated(source)
            parameters = state.parameters
            if averaged or (averaged is None and state.average is not None):
                if state.average is None:
                    raise SettingError("averaged", averaged, "ema_decay", "set it in Trainer")
                parameters = state.average.shadow
            transport = self._transport
            if transport is None or not transport.can_compute(dataset):
                stack.enter_context(unchanged(state.model))
                transport = stack.enter_context(closing(self._evaluators(state)))
            job = Evaluation(
                source,
                parameters,
                range(plan.steps_per_epoch),
                loader_workers=self._loader_workers,
                threads=self._threads,
            )
            channel = stack.enter_context(closing(transport.open(job)))
            coordinator = Coordinator(
                shards_of=plan.shards_of,
                first_step=0,
                last_step=plan.steps_per_epoch,
                rule=rules.Sync(),
                timeout_s=self._worker_timeout_s,
            )
            total = TreeSum(plan.steps_per_epoch, ShardSum.add)
            for step, parts in drive(coordinator, channel):
                total.put((0, step), tree_sum(parts, plan.shards_of(step), ShardSum.add))
        assert total.root is not None
        if total.root.weight == 0:
            raise LossError("weight: it is 0 in all shards of the evaluation: nothing to average")
        return total.root.means()

    def stop(self, reason: str = "stop() was called") -> None:
        """Finish the step under way, then end ``fit`` or ``updates``. Any thread may call it."""
        if self._channel is not None:
            self._channel.post(Stop(reason))

    def save(self) -> Path:
        """Save the state under ``run_dir``, unless it is there; returns the checkpoint's directory.

        Raises:
            UserError: there is no ``run_dir``, or nothing was trained yet.
            OSError: it cannot be written; the older checkpoints are as they were.
        """
        if self.run_dir is None or self._state is None or self._plan is None:
            raise UserError("nothing to save: set run_dir, and train first")
        self._refuse_half_an_update(self._state)
        if self._saved is None or self._saved[0] != self.global_step:
            facts = self._facts(self._plan)
            path = checkpoint.save(self.run_dir, self._state, facts)
            self._saved = (self.global_step, path)
        return self._saved[1]

    def _refuse_half_an_update(self, state: State) -> None:
        if state.update.under_way:
            raise UserError(
                f"update {state.global_step + 1} was cut off, and the parameters are half of it; "
                "make a new Trainer, which resumes from run_dir"
            )

    # --- preparing --------------------------------------------------------------------------------

    def _planned(self, rows: int, shuffle: bool) -> Plan:
        if self._shards is None:
            found = None if self.run_dir is None else checkpoint.find(self.run_dir)
            workers = min(len(self._devices), self._batch_size, rows)
            self._shards = workers if found is None else found.record["shards"]
        if self._shards > rows:
            raise _too_many_shards(self._shards, f"{rows} rows of the dataset")
        self._plan = Plan(
            rows=rows,
            batch_size=min(self._batch_size, rows),
            shards=self._shards,
            seed=self._seed,
            shuffle=shuffle,
        )
        return self._plan

    def _evaluated(self, source: Source) -> State:
        """A state to evaluate before any training: that of ``run_dir``, if there is one."""
        self._state = self._probed(source, self._say, training=False)
        found = None if self.run_dir is None else checkpoint.find(self.run_dir)
        if found is not None:
            checkpoint.load(found.path, found.record, self._state)
            self._say(f"evaluating step {self._state.global_step:,} from {found.path}")
        return self._state

    def _probed(self, source: Source, say: Callable[[str], None], *, training: bool) -> State:
        return probed(
            self.model,
            partial(self._make_state, self.model, self._home),
            self._probe_replica,
            source.load((0, 0)),
            seed=self._seed,
            training=training,
            say=say,
        )

    def _prepared(self, source: Source, say: Callable[[str], None]) -> State:
        """The state, made on first use: tried on one shard, restored if there is a checkpoint."""
        if self._state is None or not self._tried:
            self._state = self._probed(source, say, training=True)
            self._tried = True
            if self.run_dir is not None:
                self._restore(self.run_dir, self._state, say)
            if self._turns.draws:
                say(
                    "the model draws from Python's random or NumPy, which threads share: workers "
                    "compute in turn; with torch's random functions they compute side by side"
                )
        self._refuse_half_an_update(self._state)
        return self._state

    def _restore(self, run_dir: Path, state: State, say: Callable[[str], None]) -> None:
        found = checkpoint.find(run_dir)
        if found is None:
            return
        path, record, passed_over = found
        for wrong in passed_over:
            say(f"damaged, passed over: {wrong}")
        assert self._plan is not None
        here = self._facts(self._plan)
        for name in ("seed", "shards", "batch_size", "rows", "shuffle", "update"):
            if record[name] != here[name]:
                raise CheckpointError(
                    f"{path}: it was trained with {name}={record[name]!r}, and this run has "
                    f"{here[name]!r}; use the same, or choose another run_dir"
                )
        checkpoint.load(path, record, state)
        self._saved = (state.global_step, path)
        say(f"resumed step {state.global_step:,} from {path}")
        for name in ("threads", "torch", "device_types"):
            if record[name] != here[name]:
                say(f"{name} was {record[name]} and is {here[name]}: bits may differ from here on")

    def _facts(self, plan: Plan) -> dict[str, Any]:
        return {
            "epoch": self.global_step // plan.steps_per_epoch,
            "seed": self._seed,
            "shards": plan.shards,
            "batch_size": self._batch_size,
            "rows": plan.rows,
            "shuffle": plan.shuffle,
            "update": self._rule.name,
            "engine": self._engine,
            "devices": sorted({str(device) for device in self._devices}),
            "device_types": sorted({device.type for device in self._devices}),
            "workers": len(self._devices),
            "threads": self._threads,
            "torch": torch.__version__,
        }

    def _arithmetic(self, plan: Plan) -> str:
        least, most = plan.batch_size // plan.shards, -(-plan.batch_size // plan.shards)
        each = f"{least}" if least == most else f"{least}-{most}"
        threads = f"{self._threads} thread{'s' if self._threads > 1 else ''} each"
        shards = f"{plan.shards} shard{'s' if plan.shards > 1 else ''}"
        return (
            f"{plan.batch_size} rows = {shards} x {each} on {describe(self._devices)} "
            f"({threads}), {self._rule.name}"
        )

    # --- running ----------------------------------------------------------------------------------

    def _applied(
        self, state: State, plan: Plan, coordinator: Coordinator, last_step: int
    ) -> Iterator[Report]:
        assert self._channel is not None
        pace: deque[tuple[float, int]] = deque(maxlen=50)  # (seconds, rows) of the last updates
        begun = time.monotonic()
        named: frozenset[str] = frozenset()
        for step, parts in drive(coordinator, self._channel, say=self._say):
            applied = state.update.apply(parts, plan.shards_of(step), step + 1)
            state.global_step = step + 1
            if new := applied.missing - named:
                named |= new
                self._say(f"no gradient in step {step}, taken as zero: {', '.join(sorted(new))}")
            if step == coordinator.first_step:
                begun = coordinator.begun_at or begun  # workers had to start
            if step == coordinator.first_step + 1:
                pace.clear()  # and to warm up
            pace.append((time.monotonic() - begun, plan.batch_rows(step)))
            seconds = sum(s for s, _ in pace)
            yield Report(
                global_step=state.global_step,
                epoch=plan.epoch(step),
                rows=plan.batch_rows(step),
                weight=applied.weight,
                metrics=applied.metrics,
                lr=applied.lr,
                grad_norm=applied.grad_norm,
                examples_per_s=sum(r for _, r in pace) / seconds,
                last_step=last_step,
                epochs=-(-last_step // plan.steps_per_epoch),
                ends_epoch=(step + 1) % plan.steps_per_epoch == 0,
                eta_s=(last_step - step - 1) * seconds / len(pace),
            )
            begun = time.monotonic()  # what the caller does with a report is not our pace
        if state.global_step < last_step:
            self._say(f"stopped after step {state.global_step:,}: {coordinator.reason}")

    def _validate(self, dataset: Any, report: Report, log: MetricsLog | None) -> None:
        values = self.evaluate(dataset)
        assert self._state is not None
        which = "" if self._state.average is None else " of the averaged weights"
        self._say(f"epoch {report.epoch + 1}: validation{which}  {metrics(values)}")
        if log is not None:
            self._logged(log.evaluation, report.global_step, values)

    def _logged(self, write: Callable[..., None], *record: Any) -> None:
        try:
            write(*record)
        except OSError as error:
            if not self._log_failed:
                self._say(f"metrics.jsonl is not written, training goes on: {error}")
            self._log_failed = True

    def _save_under_way(self) -> None:
        if self.run_dir is None:
            return
        try:
            self.save()
        except OSError as error:  # the older checkpoints are whole, and the next save may succeed
            self._say(f"step {self.global_step:,} is not saved, training goes on: {error}")

    def _save_at_end(self) -> None:
        if self.run_dir is None or self.global_step == 0:
            return
        if self._state is not None and self._state.update.under_way:
            self._say("nothing saved: an update was cut off, and the parameters are half of it")
            return
        path = self.save()
        self._say(f"saved step {self.global_step:,} to {path}")

    @property
    def _home(self) -> torch.device:
        """Where the coordinator keeps parameters and makes updates."""
        shared = self._engine == engines.PROCESSES
        return torch.device("cpu") if shared else self._devices[0]

    def _become_a_worker(self, dataset: Any, validation: Any = None) -> None:
        """Note the data of the first loop; in a worker process, compute shards and not come back.

        A worker runs the script up to its first training loop: it has the data of no other, and
        does not know what the script changed since.
        """
        global _begun
        datasets = {"dataset": dataset, "validation": validation}
        if (worker := here()) is not None:
            worker.serve(
                self.model,
                self._loss,
                self._devices[worker.number],
                datasets,
                collate=self._collate,
                threads=self._threads,
            )
        elif not _begun:
            _begun, self._datasets = True, datasets

    def _workers(self, state: State, source: Source) -> Transport:
        """New workers, for one training loop."""
        datasets, self._datasets = self._datasets, None
        if self._script is None:
            return self._towers(state)
        if datasets is None or datasets["dataset"] is not source.dataset:
            self._say(
                "workers are towers: worker processes run a script up to its first training loop, "
                "and this one is another"
            )
            return self._towers(state)
        arena = Arena.create(
            state.model,
            state.parameters,
            None if state.average is None else state.average.shadow,
            written=state.written,
            shards=source.plan.shards,
            workers=len(self._devices),
        )
        return Processes(
            self._script,
            arena,
            state.model,
            state.buffers,
            partial(self._probe_replica, state),
            self._devices,
            datasets,
            threads=self._threads,
            timeout_s=self._worker_timeout_s,
            say=self._say,
        )

    def _towers(self, state: State) -> Towers:
        return Towers(self._devices, partial(self._replica, state), threads=self._threads)

    def _evaluators(self, state: State) -> Towers:
        """Workers for an evaluation outside of a training loop."""
        try:
            return self._towers(state)
        except CopyError:
            if self._engine != engines.PROCESSES:
                raise
            # The state is on the CPU, and nobody else uses the model now.
            make = partial(self._replica, state, own=True)
            return Towers([self._home], make, threads=self._threads)

    def _probe_replica(self, state: State) -> Replica:
        # Towers show here whether they can copy the model; worker processes copy none.
        return self._replica(state, self._home, own=self._engine == engines.PROCESSES)

    def _replica(self, state: State, device: torch.device, *, own: bool = False) -> Replica:
        return Replica(
            state.model,
            state.parameters,
            device,
            written=state.written,
            own=own,
            loss=self._loss,
            turns=self._turns,
        )


def _too_many_shards(shards: int, rows: str) -> SettingError:
    return SettingError("shards", shards, f"at most the {rows}", "choose fewer shards")
