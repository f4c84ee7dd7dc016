"""The trainer: what a user writes."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quorate.commands.bench.profile import profiled
from quorate.commands.verify.recorder import recorded
from quorate.coordination import rules
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.plan import Order, Plan, PlanApart
from quorate.coordination.protocol import Stop
from quorate.data.draws import Augment
from quorate.data.loader_processes import check_loader_processes, require_loader_memory
from quorate.data.source import Collate, Source, length
from quorate.errors import CompileError, CopyError, SettingError, UserError
from quorate.machine.devices import Devices, Group, worker_devices
from quorate.machine.memory_fraction import bound_memory, checked_fraction, free_cache
from quorate.replica import precision as precisions
from quorate.replica.computing import Computing
from quorate.replica.deterministic import deterministic
from quorate.replica.loss import Loss
from quorate.replica.notes import Notes
from quorate.replica.placement import placement
from quorate.replica.precision import tensor_float
from quorate.replica.replica import Replica, unchanged
from quorate.replica.spread import Spread
from quorate.replica.streams import Turns
from quorate.replica.totals import Finish, Totals, joined
from quorate.services.checkpoints import files as checkpoint
from quorate.services.checkpoints.saver import Checkpoints, Policy
from quorate.services.checkpoints.weights import load_weights
from quorate.services.display.display import display
from quorate.services.report import Report
from quorate.settings import directory, function, one_of, real, setting, whole
from quorate.training import resume, saved_state
from quorate.training.callbacks import Callback
from quorate.training.evaluate import evaluate
from quorate.training.fit import Beside, Fit, Loop, Validation
from quorate.training.loop import Updates
from quorate.training.opening import opening
from quorate.training.optimizer import OptimizerFactory
from quorate.training.probe import made, probed
from quorate.training.state import State
from quorate.training.stop import Stops
from quorate.training.update import Schedule, intra_op_threads
from quorate.training.validation import Best
from quorate.transports import Transport, engines
from quorate.transports.job import Training
from quorate.transports.processes.arena import Arena
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here
from quorate.transports.towers import Towers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# How many shards' results may wait per worker, until older ones are applied. Only memory bounds it.
RESULTS_PER_WORKER = 4

NOT_FINITE = ("stop", "skip")

COMPILE_S = 600.0  # that a shape may take to compile

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
        totals: what is counted and not averaged: intersection over union, BLEU. From a name, under
            which the loss function may return integers of any one shape (in evaluation mode alone,
            if it likes), to a function that gets the sum over all shards, int64, exact, once per
            evaluation, and per update if there are some; it returns a number, or several by names.
            ``totals={"confusion": iou}``: see docs/metrics.md.
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
        memory_fraction: how much of its device's memory each worker's tensors may take, above 0
            and at most 1: set it where others need the rest. Default: no bound, memory is taken
            as it is needed. It has no effect on a CPU.
        precision: "fp32", with TensorFloat-32 off; "tf32"; "bf16", which keeps float32 parameters
            and computes with bfloat16 copies of them; "fp16" likewise, on GPUs. The bits depend on
            it: see docs/precision.md.
        compile: whether the model is compiled by torch.compile, once per shape of a shard; on an
            NVIDIA GPU a whole shard is then replayed as a CUDA graph where that works. Compiled
            operations round in another way, so the bits depend on it. What cannot be compiled runs
            as it is, and the reason is said.
        soft_placement: whether an operator that a device has no kernel for runs on the CPU. It is
            named once, with the module that called it. Without it that is an error. Not together
            with ``compile``.
        log_placement: show which module and operator ran where, as a table, for the first shard.
        update: the update rule. "sync": all shards of a batch. "quorum:R": the first R of them, the
            rest is dropped. "async": each shard is an update of its own, applied as it comes.
            "bounded:K": likewise, but none from parameters more than K updates old. The bits depend
            on timing but for "sync"; which to choose, and the learning rate: docs/update-rules.md.
        schedule: from the optimizer to a torch LR scheduler, stepped once per update.
        clip_norm: bound on the global norm of the mean gradient.
        ema_decay: average the parameters, with min(ema_decay, (1 + n) / (10 + n)) after n updates.
            The averaged weights are evaluated, and saved beside the plain ones.
        collate: from a list of samples to a batch. Default: torch's.
        augment: ``augment(batch, draws)`` returns what is trained on in the place of a collated
            batch, here a shard of one; not in ``evaluate``. It runs where rows are loaded, beside
            computing. ``draws`` gives random numbers that belong to row and epoch: see
            ``quorate.data.draws.Draws``, and ``quorate.data.images`` for what to do with them.
        order: from the rows of an epoch as they are shuffled, (R,) int64, to the order that ``fit``
            takes them in, each once: rows of like length into one batch, say. A pure function.
        loader_workers: processes that load rows, of each worker process or for all towers
            together. Turn it up if decoding is slow.
        worker_timeout_s: a worker process that has been at one shard for so long, and for 3 times
            its usual time, is replaced, and one that has not reached the training loop by then.
            Turn it up if a step or the start of the script may take longer.
        nonfinite: what to do before an update whose loss or gradient is not finite: "stop", which
            names step, shards, rows and parameters, or "skip" it, which is said and counted.
        init_from: weights to begin from: .safetensors, a state dict by ``torch.save``, or a run
            directory. A run that is resumed has its own.
        fresh: begin anew in a ``run_dir`` that holds a run, which is moved aside.
        save_every_s: seconds from one checkpoint to the next, the most that a kill may cost; None
            for none but at the end, after a stop and after an exception.
        save_every_steps: also after every so many updates; training waits for the disk.
        keep: how many of the newest checkpoints stay.
        keep_every_h: one checkpoint every so many hours stays for ever.
        summary_every_s: seconds between two points of a curve in TensorBoard; None for none.
        max_time_s: seconds after which ``fit`` finishes the step under way, saves, and returns.
        callbacks: what you want to happen besides; see ``Callback``.

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
        totals: Mapping[str, Finish] | None = None,
        shards: int | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        devices: Devices = None,
        workers: int | None = None,
        engine: str | None = None,
        threads: int = 1,
        memory_fraction: float | None = None,
        precision: str = "fp32",
        compile: bool = False,
        soft_placement: bool = False,
        log_placement: bool = False,
        update: str = "sync",
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        collate: Collate | None = None,
        augment: Augment | None = None,
        order: Order | None = None,
        loader_workers: int = 0,
        worker_timeout_s: float = 300.0,
        nonfinite: str = "stop",
        init_from: str | Path | None = None,
        fresh: bool = False,
        save_every_s: float | None = 600.0,
        save_every_steps: int | None = None,
        keep: int = 5,
        keep_every_h: float | None = None,
        summary_every_s: float | None = 20.0,
        max_time_s: float | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._groups = worker_devices(setting("devices", devices), setting("workers", workers))
        self._devices = [device for group in self._groups for device in group]
        self._engine, self._script = engines.chosen(setting("engine", engine), self._devices)
        self._threads = whole("threads", setting("threads", threads), least=1)
        self._memory_fraction = checked_fraction(
            setting("memory_fraction", memory_fraction), self._devices
        )
        self._computing = Computing(
            precisions.parse(setting("precision", precision), self._devices),
            compile=bool(setting("compile", compile)),
            soft_placement=bool(setting("soft_placement", soft_placement)),
            log_placement=bool(setting("log_placement", log_placement)),
        )
        placement.check(self._computing, self._devices)
        self._notes = Notes()
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
        self._augment = augment and function("augment", augment, "of a batch and what it draws")
        self._order = order and function("order", order, "from an epoch's rows to the same rows")
        self._loader_workers = whole("loader_workers", loader_workers, least=0)
        if self._loader_workers:
            check_loader_processes()
        self._worker_timeout_s = real("worker_timeout_s", worker_timeout_s, above=0)
        self._loss = function("loss", loss, "of a model and a batch")
        self._totals = Totals(totals)
        self._nonfinite = one_of("nonfinite", setting("nonfinite", nonfinite), NOT_FINITE)
        self._fresh = bool(setting("fresh", fresh))
        policy = Policy(
            every_s=_seconds("save_every_s", setting("save_every_s", save_every_s)),
            every_steps=_count("save_every_steps", setting("save_every_steps", save_every_steps)),
            keep=whole("keep", keep, least=1),
            keep_every_h=_seconds("keep_every_h", keep_every_h),
        )
        self._beside = Beside(
            policy,
            _seconds("summary_every_s", summary_every_s),
            _seconds("max_time_s", setting("max_time_s", max_time_s)),
            tuple(callbacks),
            self._totals,
        )
        self._kept = {"clip_norm": clip_norm, "ema_decay": ema_decay}  # in checkpoints, to compare
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
        self._stops: Stops | None = None  # of the loop under way
        self._plan: Plan | None = None
        self._tried = False  # on a training shard
        self._saved: tuple[int, Path] | None = None  # the newest checkpoint: its step and where
        self._fit: Fit | None = None  # under way
        self._say: Callable[[str], None] = logging.getLogger("quorate").warning
        self.model = made(model, self._seed)
        is_spread = any(len(group) > 1 for group in self._groups)
        self._spread = Spread(self.model, self._groups) if is_spread else None
        self._init_from = setting("init_from", init_from)
        if self._init_from is not None:  # in workers too: frozen weights are theirs
            load_weights(self.model, Path(self._init_from), self._say)

    @property
    def global_step(self) -> int:
        """Updates applied so far."""
        return 0 if self._state is None else self._state.global_step

    @property
    def averaged_model(self) -> torch.nn.Module | None:
        """A copy of the model with the averaged weights; None without ``ema_decay``."""
        return None if self._state is None else self._state.averaged_model()

    @property
    def summaries(self) -> SummaryWriter | None:
        """Where callbacks put images and text while ``fit`` runs; None without summaries."""
        return None if self._fit is None else self._fit.summaries

    def updates_per_epoch(self, dataset: Any) -> int:
        """How many updates a pass over the dataset takes: a shard each under async and bounded:K.

        A schedule is made when training begins, and so may ask the trainer that it belongs to.
        """
        return self._made_plan(length(dataset), shuffle=True).steps_per_epoch

    def fit(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        steps: int | None = None,
        validation: Any = None,
        shuffle: bool = True,
        evaluate_every_epochs: int = 1,
        evaluate_every_steps: int | None = None,
        best: str | None = None,
    ) -> None:
        """Train until so many epochs are done, counted from the first run in ``run_dir``.

        Goes on from the newest sound checkpoint in ``run_dir``. Shows progress, writes
        metrics.jsonl and TensorBoard's summaries, evaluates ``validation``, and saves the state now
        and then and at the end: also after Ctrl-C or SIGTERM (the step under way is finished, then
        the process leaves as it would have; a second one stops at once), ``max_time_s``, and an
        exception of the user's code. SIGUSR1 saves and goes on.

        Args:
            dataset: a map-style dataset.
            epochs: passes over it in all.
            steps: updates in all; if given, ``epochs`` does not count.
            validation: a map-style dataset.
            shuffle: whether each epoch has an order of its own; else the dataset's.
            evaluate_every_epochs: how often ``validation`` is evaluated, and at the end.
            evaluate_every_steps: the same in updates; if given, the epochs do not count.
            best: "max:accuracy" or "min:loss", say: the checkpoint with the best of this metric of
                ``validation`` is saved and stays.

        Raises:
            UserError: something cannot work; no update was made.
            NotFiniteError: a loss or gradient was not finite; that update was not made.
            KeyboardInterrupt: after Ctrl-C, with everything saved.
            SystemExit: after SIGTERM, likewise.
        """
        self._become_a_worker(dataset, validation)
        wanted: Validation | None = None
        if validation is not None:
            length(validation, "validation")
            wanted = Validation(
                partial(self._evaluation, validation, None),
                whole("evaluate_every_epochs", evaluate_every_epochs, least=1),
                _count("evaluate_every_steps", evaluate_every_steps),
                None if best is None else Best(best),
            )
        elif best is not None:
            raise SettingError("best", best, "a validation set to find it with", "pass validation")
        with ExitStack() as stack:
            screen = stack.enter_context(closing(display()))
            stack.callback(setattr, self, "_say", self._say)
            self._say = screen.say
            self._fit = fit = Fit(self, self._beside, wanted, self._facts, screen)
            stack.callback(self._end_fit, fit)
            fit.train(lambda stops: self._loop(dataset, epochs, steps, shuffle, stops))

    def _end_fit(self, fit: Fit) -> None:
        self._saved, self._fit = fit.saved or self._saved, None

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
        with self._loop(dataset, epochs, steps, shuffle, Stops()) as loop:
            yield from loop.reports

    @contextmanager
    def _loop(
        self, dataset: Any, epochs: int, steps: int | None, shuffle: bool, stops: Stops
    ) -> Iterator[Loop]:
        """Prepare a training loop, and end its workers afterwards."""
        if self._stops is not None:
            raise UserError("a loop over updates is under way; close it before another is begun")
        self._begin_afresh()
        self._plan = plan = self._made_plan(length(dataset), shuffle)
        last_step = whole("epochs", epochs, least=1) * plan.steps_per_epoch
        if steps is not None:
            last_step = whole("steps", steps, least=1)
        with ExitStack() as stack:
            self._stops = stops
            stack.callback(setattr, self, "_stops", None)
            stack.enter_context(intra_op_threads(self._threads))
            source = Source(dataset, plan, self._collate, self._augment)
            notes: list[str] = stack.enter_context(tensor_float(self._computing.precision))
            notes += stack.enter_context(deterministic(self._devices))
            state = self._prepared(source, notes.append)
            if self._loader_workers:
                require_loader_memory(
                    source.load((0, 0)).data,
                    shards=plan.shards,
                    loader_workers=self._loader_workers,
                    feeds=len(self._groups) if self._script is not None else 1,
                )
            first = opening(
                plan,
                self._groups,
                self._home,
                state.model,
                threads=self._threads,
                rule=self._rule,
                computing=self._computing,
                memory_fraction=self._memory_fraction,
            )
            for line in (*first, *notes, *self._notes.take()):
                self._say(line)
            loop = Loop(state, plan, last_step, self._saved, None, iter(()))
            if state.global_step >= last_step:
                self._say(f"nothing to do: {state.global_step:,} of {last_step:,} updates are done")
                yield loop
                return
            if stops.reason is not None:  # workers take seconds to start
                self._say(f"stopped after step {state.global_step:,}: {stops.reason}")
                yield loop
                return
            facts = self._facts(state)
            workers = profiled(self._workers(state, source), state, facts)
            workers = recorded(workers, state, facts)
            self._transport = stack.enter_context(closing(workers))
            stack.callback(setattr, self, "_transport", None)
            job = Training(
                source,
                state.parameters,
                range(min([state.global_step, *state.left_open]), last_step),
                on_snapshots=self._on_snapshots,
                loader_workers=self._loader_workers,
                threads=self._threads,
            )
            channel = stack.enter_context(closing(self._transport.open(job)))
            stack.enter_context(stops.telling(lambda reason: channel.post(Stop(reason))))
            coordinator = Coordinator(
                shards_of=plan.shards_of,
                home_of=plan.home,
                reach=plan.reach,
                first_step=state.global_step,
                last_step=last_step,
                left_open=state.left_open,
                tally=state.tally,
                rule=self._rule,
                most_open=RESULTS_PER_WORKER * len(self._groups),
                timeout_s=self._patience_s if self._transport.can_replace else None,
            )
            updates = Updates(
                state,
                source,
                self._rule,
                last_step,
                len(self._groups),
                self._totals,
                self._nonfinite,
                partial(self._probe_replica, state),
                self._say,
                self._notes,
            )
            with closing(updates.reports(coordinator, channel)) as reports:
                yield loop._replace(transport=self._transport, reports=reports)

    def evaluate(self, dataset: Any, *, averaged: bool | None = None) -> dict[str, float]:
        """Weighted means of loss and metrics, and finished totals, over every row, each once.

        Args:
            dataset: a map-style dataset.
            averaged: whether to use the averaged weights. Default: if there are any.

        Raises:
            UserError: the dataset is empty, its weight is zero, or nothing is averaged.
        """
        found = self._evaluation(dataset, averaged, Stops())
        assert found is not None
        return found

    def _evaluation(
        self, dataset: Any, averaged: bool | None, stops: Stops
    ) -> dict[str, float] | None:
        """What ``evaluate`` returns, or None if it was stopped."""
        rows = length(dataset)
        plan = Plan(
            rows=rows,
            batch_size=min(self._batch_size, rows),
            shards=self._shards or len(self._groups),
            seed=self._seed,
            shuffle=False,
        )
        with ExitStack() as stack:
            stack.enter_context(intra_op_threads(self._threads))
            stack.enter_context(tensor_float(self._computing.precision))
            stack.enter_context(deterministic(self._devices))
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
            total = evaluate(
                source,
                parameters,
                transport,
                stops,
                loader_workers=self._loader_workers,
                threads=self._threads,
                timeout_s=self._patience_s,
            )
        for line in self._notes.take():
            self._say(line)
        if total is None:
            return None
        return joined(total.means(), self._totals.finished(total.totals))

    def stop(self, reason: str = "stop() was called") -> None:
        """Finish the step under way, then end ``fit`` or ``updates``. Any thread may call it."""
        if self._stops is not None:
            self._stops.ask(reason)

    def save(self) -> Path:
        """Write a checkpoint of the state as it is, and return its directory.

        Raises:
            UserError: there is no ``run_dir``, or nothing was trained yet.
            OSError: it cannot be written; the older checkpoints are as they were.
        """
        if self.run_dir is None or self._state is None or self._plan is None:
            raise UserError("nothing to save: set run_dir, and train first")
        self._refuse_half_an_update(self._state)
        if self._saved is None or self._saved[0] != self.global_step:
            with closing(Checkpoints(self.run_dir, self._beside.policy)) as saver:
                path = saver.write(saved_state.contents(self._state, self._facts(self._state)))
            self._saved = (self.global_step, path)
        return self._saved[1]

    def _refuse_half_an_update(self, state: State) -> None:
        if state.update.under_way:
            raise UserError(
                f"update {state.global_step + 1} was cut off, and the parameters are half of it; "
                "make a new Trainer, which resumes from run_dir"
            )

    # --- preparing --------------------------------------------------------------------------------

    def _begin_afresh(self) -> None:
        """Move what an earlier run left in ``run_dir`` aside, if that is wanted: once."""
        if not self._fresh or self.run_dir is None:
            return
        self._fresh = False
        if (folder := resume.set_aside(self.run_dir)) is not None:
            self._say(f"the run that was in {self.run_dir} is in {folder} now")

    def _found(self) -> checkpoint.Sound | None:
        """The checkpoint to go on from."""
        return None if self.run_dir is None or self._fresh else checkpoint.find(self.run_dir)

    def _made_plan(self, rows: int, shuffle: bool) -> Plan:
        if self._shards is None:
            found = self._found()
            workers = min(len(self._groups), self._batch_size, rows)
            self._shards = workers if found is None else found.record["shards"]
        if self._shards > rows:
            raise _too_many_shards(self._shards, f"{rows} rows of the dataset")
        if self._shards < self._rule.least_shards:
            raise SettingError(
                "update",
                self._rule.name,
                f"at most the {self._shards} shards of a batch",
                "choose a smaller quorum, or more shards",
            )
        kind = PlanApart if self._rule.is_apart else Plan
        return kind(
            rows=rows,
            batch_size=min(self._batch_size, rows),
            shards=self._shards,
            seed=self._seed,
            shuffle=shuffle,
            order=self._order,
        )

    def _evaluated(self, source: Source) -> State:
        """A state to evaluate before any training: that of ``run_dir``, if there is one."""
        self._state = self._probed(source, self._say, training=False)
        found = self._found()
        if found is not None:
            saved_state.load(found.path, found.record, self._state)
            self._say(f"evaluating step {self._state.global_step:,} from {found.path}")
        return self._state

    def _probed(self, source: Source, say: Callable[[str], None], *, training: bool) -> State:
        # Worker processes bound their own; this one has a copy of the first's for a while.
        own = self._devices if self._engine == engines.TOWERS else self._groups[0]
        bound_memory(own, self._memory_fraction)
        if self._computing.compile:
            self._say("compiling: the first shard of each shape takes seconds to minutes longer")
        while True:
            try:
                return probed(
                    self.model,
                    partial(self._make_state, self.model, self._home),
                    self._probe_replica,
                    source.load((0, 0)),
                    seed=self._seed,
                    training=training,
                    say=say,
                )
            except CompileError as error:
                # Decided once for all workers, as compiled operations round in another way.
                say(f"compile is off: {error.why}")
                self._computing = replace(self._computing, compile=False)

    def _prepared(self, source: Source, say: Callable[[str], None]) -> State:
        """The state, made on first use: tried on one shard, restored if there is a checkpoint."""
        if self._state is None or not self._tried:
            self._state = self._probed(source, say, training=True)
            self._tried = True
            if self._engine == engines.PROCESSES:
                free_cache(self._devices)
            self._restore(self._state, say)
            if self._turns.draws:
                say(
                    "the model draws from Python's random or NumPy, which threads share: workers "
                    "compute in turn; with torch's random functions they compute side by side"
                )
        self._refuse_half_an_update(self._state)
        return self._state

    def _restore(self, state: State, say: Callable[[str], None]) -> None:
        if self.run_dir is None:
            return
        assert self._plan is not None
        facts = self._facts(state)
        found = resume.restore(self.run_dir, state, facts, self._plan.steps_per_epoch, say)
        if found is not None:
            self._saved = (state.global_step, found.path)
            if self._init_from is not None:
                say(f"init_from={str(self._init_from)!r} is of no use: the run has its own weights")

    def _facts(self, state: State) -> dict[str, Any]:
        """What a checkpoint says beside what it holds."""
        plan = self._plan
        assert plan is not None
        scheduler = state.update.scheduler
        return {
            "epoch": state.global_step // plan.steps_per_epoch,
            "seed": self._seed,
            "shards": plan.shards,
            "batch_size": self._batch_size,
            "rows": plan.rows,
            "shuffle": plan.shuffle,
            "is_ordered": plan.order is not None,
            "is_augmented": self._augment is not None,
            "update": self._rule.name,
            "engine": self._engine,
            "devices": sorted({str(group) for group in self._groups}),
            "device_types": sorted({device.type for device in self._devices}),
            "workers": len(self._groups),
            "threads": self._threads,
            "precision": self._computing.precision.name,
            "compile": self._computing.compile,
            "schedule": None if scheduler is None else type(scheduler).__name__,
            **self._kept,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "account": state.account(),
        }

    # --- running ----------------------------------------------------------------------------------

    @property
    def _home(self) -> torch.device:
        """Where the coordinator keeps parameters and makes updates."""
        shared = self._engine == engines.PROCESSES
        return torch.device("cpu") if shared or self._spread is not None else self._devices[0]

    @property
    def _patience_s(self) -> float:
        """How long a worker may be silent: also while it compiles a shape that is new to it."""
        return self._worker_timeout_s + (COMPILE_S if self._computing.compile else 0.0)

    @property
    def _on_snapshots(self) -> bool:
        # One worker does not compute while an update is made.
        return self._rule.staleness > 0 and len(self._groups) > 1

    def _become_a_worker(self, dataset: Any, validation: Any = None) -> None:
        """Note the data of the first loop; in a worker process, compute shards and not come back.

        A worker runs the script up to its first training loop: it has the data of no other, and
        does not know what the script changed since.
        """
        global _begun
        datasets = {"dataset": dataset, "validation": validation}
        if (worker := here()) is not None:
            bound_memory(self._groups[worker.number], self._memory_fraction)
            worker.serve(
                self.model,
                self._loss,
                self._groups[worker.number],
                datasets,
                spread=self._spread,
                collate=self._collate,
                augment=self._augment,
                order=self._order,
                threads=self._threads,
                totals=self._totals.names,
                computing=self._computing,
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
            results=(
                RESULTS_PER_WORKER * len(self._groups)
                if self._rule.is_apart
                else source.plan.shards
            ),
            on_snapshots=self._on_snapshots,
            workers=len(self._groups),
        )
        return Processes(
            self._script,
            arena,
            state.model,
            state.buffers,
            partial(self._probe_replica, state),
            self._groups,
            datasets,
            threads=self._threads,
            compiles=self._computing.compile,
            timeout_s=self._patience_s,
            say=self._say,
            notes=self._notes,
        )

    def _towers(self, state: State) -> Towers:
        return Towers(
            self._groups, partial(self._replica, state), state.buffers, threads=self._threads
        )

    def _evaluators(self, state: State) -> Towers:
        """Workers for an evaluation outside of a training loop."""
        try:
            return self._towers(state)
        except CopyError:
            if self._engine != engines.PROCESSES:
                raise
            # The state is on the CPU, and nobody else uses the model now.
            make = partial(self._replica, state, own=True)
            return Towers([Group([self._home])], make, state.buffers, threads=self._threads)

    def _probe_replica(self, state: State) -> Replica:
        # Towers show here whether they can copy the model; worker processes copy none. Where they
        # have GPUs the coordinator tries a copy on one: kernels and bits are those of the device.
        home, first = Group([self._home]), self._groups[0]
        if self._engine == engines.TOWERS:
            return self._replica(state, first, logs=False)
        if first != home and self._spread is None:
            with suppress(CopyError):
                return self._replica(state, first, logs=False)
        return self._replica(state, home, own=True, logs=False)

    def _replica(
        self, state: State, group: Group, *, own: bool = False, logs: bool = True
    ) -> Replica:
        logs = logs and self._computing.log_placement
        return Replica(
            state.model,
            state.parameters,
            group,
            spread=self._spread if len(group) > 1 else None,
            written=state.written,
            own=own,
            loss=self._loss,
            totals=self._totals.names,
            turns=self._turns,
            computing=replace(self._computing, log_placement=logs),
            notes=self._notes,
        )


def _seconds(name: str, value: float | None) -> float | None:
    return None if value is None else real(name, value, above=0)


def _count(name: str, value: int | None) -> int | None:
    return None if value is None else whole(name, value, least=1)


def _too_many_shards(shards: int, rows: str) -> SettingError:
    return SettingError("shards", shards, f"at most the {rows}", "choose fewer shards")
