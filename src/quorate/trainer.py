"""The Trainer class: the interface for training, evaluation and prediction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.coordination.run_event import showing
from quorate.errors import UserError
from quorate.services.display.shown import Shown
from quorate.services.display.straggler import Stragglers
from quorate.services.display.uncaught import fold_tracebacks
from quorate.settings import named, resolved, setting
from quorate.training.config import (
    ELSEWHERE,
    Compute,
    DatasetConfig,
    Loading,
    RunDir,
    TrainerConfig,
    Workers,
    losses_of,
    optimize_of,
)
from quorate.training.earlier_fits import begin_fit
from quorate.training.ending import weights
from quorate.training.evaluate import evaluate
from quorate.training.fit import Fit, Services, save_now
from quorate.training.loop import Loop
from quorate.training.model import Models, make_model
from quorate.training.notices import once
from quorate.training.predicting.predict import Function, predict
from quorate.training.prepare import (
    TrainingSetup,
    planned,
    prepare,
    read_dataset_config,
    refuse_half_an_update,
)
from quorate.training.probing.before_workers import looking
from quorate.training.stop import Stops
from quorate.training.stop_after import StopAfter
from quorate.training.validation import ELSEWHERE_IN_FIT, Validation
from quorate.training.worker_group import WorkerGroup

if TYPE_CHECKING:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from quorate.engines.worker_status import WorkerStatus
    from quorate.replica.phases.losses import Losses
    from quorate.services.report import Report
    from quorate.training.callbacks import Callback
    from quorate.training.config import Devices
    from quorate.training.optimizing.choices import Optimizers


class Trainer:
    """Train a model on all devices, with bit-identical weights on any number of devices.

    Args:
        model: a ``torch.nn.Module``, or a function without arguments that returns a module. The
            trainer calls the function with torch's generators seeded by ``seed``, so the initial
            weights depend on ``seed`` too. For several models pass a dict of modules or functions;
            the trainer puts the modules into one ``torch.nn.ModuleDict``: see
            docs/several-models.md.
        loss: ``loss(model, batch)`` returns the mean loss over the rows of the batch as a scalar
            tensor, or a dict with the mean loss under "loss" and further scalars (metrics) under
            names of your choice. If the means are over n tokens or pixels instead of rows, add n to
            the dict under "weight". The function must use the ``model`` argument and no other copy
            of the model.

            A function with a third parameter, ``loss(model, batch, at)``, receives the position of
            the shard in the run: see docs/state-outside-the-model.md.

            To train in phases, which take turns with one update each, pass a dict from the name of
            a phase to its loss, or a list of ``(name, loss)`` or ``Phase(...)``, in which a phase
            may appear more than once.

            For a loss that compares rows with each other, pass ``Gather``.
        totals: quantities to sum instead of average, such as the counts behind intersection over
            union or BLEU; a dict from a name to a function.

            The loss function returns integers of one fixed shape under that name, in evaluation
            mode only or always. The function receives the exact int64 sum over all shards, once per
            evaluation and, if the loss function returns the counts in training, once per update;
            the function returns a number, or a dict of numbers. Instead of a function,
            ``Collect(...)`` and metrics of torchmetrics work too: see docs/metrics.md.
        optimizer: a function from a list of parameters to a torch optimizer, or ``Optimize(...)``
            to add a schedule, gradient clipping or averaged weights. With phases, one function or
            group for all phases, or a dict from the name of a phase to its optimizer.
        batch_size: rows per update, over all devices.
        shards: number of pieces V that each batch is cut into. The result depends on ``shards``,
            not on the number of devices. Default: the number of workers of the first run. Set
            ``shards`` to get the same result on another number of devices. Increase ``shards`` to
            need less memory on a device (gradient accumulation). With more workers than shards, the
            surplus workers stand in for slow or lost workers.
        seed: seed of the row order, of dropout and of augmentation. Default: 0.
        devices: torch devices or their names, as a list or separated by commas. Default: every
            visible GPU; without a GPU, one CPU worker per core, at most 8.
        workers: number of workers, dealt over the devices in turn, or ``Workers(...)`` to choose
            the engine, threads and limits too. Default: one worker per entry of ``devices``.
        update: the update rule. "sync" (the default) waits for all shards of a batch. "quorum:R"
            waits for the first R shards and drops the others. "async" applies each shard as an
            update. "bounded:K" is "async" without gradients from parameters more than K updates
            old. Under every rule except "sync", the bits depend on timing. docs/which-mode.md
            compares the rules and says how to set the learning rate.
        precision: number format of the computation. "fp32" (the default): float32, with
            TensorFloat-32 off. "tf32": TensorFloat-32 products on NVIDIA GPUs. "bf32": bfloat16
            products on CPUs with AMX. "bf16" and "fp16": bfloat16 or float16 copies of float32
            parameters; "fp16" is meant for GPUs. The bits depend on the precision: see
            docs/precision.md.
        compute: ``Compute(...)``: compilation, determinism, and the placement of operators.
        loading: ``Loading(...)``: how rows become batches.
        run_dir: directory for checkpoints and metrics; an interrupted run in the directory resumes.
            Or ``RunDir(...)``, to choose the interval of the checkpoints too. Default: nothing is
            written.

    Raises:
        SettingError: a value is not valid; no worker was started.
    """

    @named(ELSEWHERE)
    def __init__(
        self,
        model: Models,
        loss: Losses,
        *,
        totals: Mapping[str, Any] | None = None,
        optimizer: Optimizers,
        batch_size: int,
        shards: int | None = None,
        seed: int = 0,
        devices: Devices = None,
        workers: int | str | Workers | None = None,
        update: str = "sync",
        precision: str = "fp32",
        compute: Compute | None = None,
        loading: Loading | None = None,
        run_dir: str | Path | RunDir | None = None,
    ) -> None:
        fold_tracebacks()  # before any setting is refused, and before any user code runs
        losses = losses_of(loss, totals)
        self._config = config = TrainerConfig(
            loss=losses,
            totals=totals,
            optimize=optimize_of(optimizer, losses),
            batch_size=batch_size,
            devices=setting("devices", devices),
            workers=resolved(Workers, workers),
            shards=setting("shards", shards),
            seed=setting("seed", seed),
            update=setting("update", update),
            precision=setting("precision", precision),
            compute=resolved(Compute, compute),
            loading=resolved(Loading, loading),
            run_dir=resolved(RunDir, run_dir),
        )
        self._say: Callable[[str], None] = showing(logging.getLogger("quorate").warning)
        self._workers = WorkerGroup(config, lambda: make_model(model, config.seed, losses))
        self.model = self._workers.given
        if config.run_dir.init_from is not None:  # in workers too, for their frozen weights
            weights.load_weights(self.model, config.run_dir.init_from, self._say)
        self._setup = TrainingSetup.of(config)
        self._stops: Stops | None = None  # of the current loop, evaluation or prediction
        self._loop: Loop | None = None  # the current loop
        self._fit: Fit | None = None  # the current fit

    @property
    def run_dir(self) -> Path | None:
        """The run directory, or None if nothing is saved."""
        path = self._config.run_dir.path
        return None if path is None else Path(path)

    @property
    def workers(self) -> list[WorkerStatus]:
        """The current status of each worker; empty while no loop runs. Thread-safe."""
        transport = None if self._loop is None else self._loop.transport
        return [] if transport is None else transport.status()

    @property
    def global_step(self) -> int:
        """Number of updates applied so far."""
        return 0 if self._setup.state is None else self._setup.state.global_step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer; empty before training.

        You may change the groups between updates.
        """
        return [] if self._setup.state is None else self._setup.state.phases.param_groups

    @property
    def averaged_model(self) -> torch.nn.Module | None:
        """A copy of the model with the averaged weights; None without ``Optimize(ema_decay=)``."""
        return None if self._setup.state is None else self._setup.state.averaged_model()

    @property
    def summaries(self) -> SummaryWriter | None:
        """TensorBoard's ``SummaryWriter`` of the running ``fit``, for images and text of callbacks.

        None outside ``fit``, without a ``run_dir``, with ``summary_every_s=None``, or if the
        package tensorboard is not installed.
        """
        return None if self._fit is None else self._fit.summaries

    def updates_per_epoch(self, dataset: Any, phase: str | None = None) -> int:
        """Return the number of updates in one pass over the dataset.

        Under "async" and "bounded:K" each shard is an update. An LR schedule may call this method
        of its trainer, because schedules are made when training begins.

        Args:
            dataset: a map-style dataset.
            phase: count only the updates of this phase, as the schedule of the phase does. Default:
                count all updates.
        """
        data = read_dataset_config(self._config, dataset)
        return planned(self._workers, self._setup, data).updates_of(phase)

    @named(ELSEWHERE_IN_FIT)
    def fit(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        steps: int | None = None,
        validation: Any = None,
        shuffle: bool | None = None,
        callbacks: Sequence[Callback] = (),
        max_time_s: float | None = None,
    ) -> None:
        """Train for ``epochs`` or ``steps`` in total, counted from the first run in ``run_dir``.

        If ``run_dir`` has a sound checkpoint, training resumes from the newest. ``fit`` shows
        progress, writes metrics.jsonl and TensorBoard summaries, evaluates ``validation``, and
        saves the state at intervals and at the end. The state is also saved after Ctrl-C, SIGTERM
        or SIGHUP, after ``max_time_s``, and after an exception in your code. On the first signal
        ``fit`` finishes the current step, saves and raises; a second signal stops at once. SIGUSR1
        saves a checkpoint, and training continues.

        Args:
            dataset: a map-style dataset, or a ``DataLoader``. Of a ``DataLoader``, ``fit`` uses the
                dataset, order, ``collate_fn``, ``num_workers`` and ``drop_last``, and prints a line
                about them.
            epochs: total number of passes over the dataset, over all resumes. Default: 1.
            steps: total number of updates, over all resumes. If set, ``epochs`` is ignored.
            validation: a map-style dataset, a ``DataLoader``, or ``Validation(...)`` to choose how
                often to evaluate and which metric decides the best checkpoint. Default: no
                validation.
            shuffle: True for a new row order in each epoch, False for the order of the dataset.
                Default: as the ``DataLoader`` does; True for a dataset.
            callbacks: objects with methods that ``fit`` calls after updates, evaluations and
                checkpoints; see ``Callback``.
            max_time_s: seconds of training, counted from the first shard, after which ``fit``
                finishes the current step, saves and returns. Default: no limit.

        Raises:
            UserError: a setting, the dataset or the model is not valid; no update was made.
            NotFiniteError: a loss or gradient was not finite; the update was not applied.
            SaveError: the last update cannot be saved. SaveError is also an ``OSError``.
            KeyboardInterrupt: after Ctrl-C, with everything saved.
            SystemExit: after SIGTERM or SIGHUP, with everything saved.
        """
        chosen = None if validation is None else resolved(Validation, validation)
        data, rows = read_dataset_config(self._config, dataset, shuffle=shuffle), None
        if chosen is not None:
            rows = read_dataset_config(
                self._config, chosen.dataset, trains=False, name="validation"
            )
            if rows.line is None:  # a plain dataset: batches are made as in training
                rows = rows._replace(loading=data.loading)
        for optimize in self._config.optimize.values():
            optimize.require_validation(is_there=chosen is not None)
        duration = resolved(StopAfter, StopAfter(epochs=epochs, steps=steps, max_time_s=max_time_s))
        self._workers.begin_loop(data, rows)
        self._workers.stragglers = stragglers = Stragglers.none()
        services = Services(
            self._config.run_dir,
            self._setup.lock.renew,
            duration.max_time_s,
            callbacks,
            self._workers.replicas.totals,
            chosen,
            partial(self._evaluated, rows, None, called="validation"),
            looking(self._workers, chosen, rows, callbacks),
            stragglers.slow_workers,
        )
        say = self._say
        with closing(Fit(self, services, self._facts)) as fit:
            self._fit, self._say = fit, fit.say
            try:
                look, at = services.look, fit.at
                fit.train(lambda stops: self._looping(data, duration, stops, look, at))
            finally:
                self._setup.saved = fit.saved or self._setup.saved
                if (line := stragglers.summary()) is not None:
                    fit.mention(line)
                self._fit, self._say = None, say

    def updates(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool | None = None,
    ) -> Generator[Report]:
        """Train as ``fit`` does, in a generator that yields a report after each update.

        Nothing is saved or shown. Workers wait while your loop body runs, so you may read and
        change the model there. Leaving the loop ends the workers; a later loop continues with the
        next update. Arguments and errors are the same as for ``fit``.
        """
        for optimize in self._config.optimize.values():
            optimize.require_validation(is_there=False)
        data = read_dataset_config(self._config, dataset, shuffle=shuffle)
        duration = StopAfter(epochs=epochs, steps=steps)
        self._workers.begin_loop(data)
        with self._naming_stragglers(), self._looping(data, duration, Stops()) as loop:
            yield from loop.reports

    @contextmanager
    def _looping(
        self,
        data: DatasetConfig,
        duration: StopAfter,
        stops: Stops,
        look: Callable[..., None] = lambda *_: None,
        at: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Loop]:
        if self._stops is not None:
            raise UserError(
                "updates", "another loop over updates is still open", fix="close that loop first"
            )
        begun = self._workers, self._setup, data, duration
        preparing = prepare(*begun, stops=stops, say=self._say, look=look, at=at)
        self._stops = stops
        try:
            with preparing as self._loop:
                yield self._loop
        finally:
            self._stops = self._loop = None

    def evaluate(self, dataset: Any, *, averaged: bool | None = None) -> dict[str, float]:
        """Return the mean loss and metrics, and the finished totals, over all rows of a dataset.

        Each row counts once.

        Args:
            dataset: a map-style dataset, or a ``DataLoader`` of a map-style dataset.
            averaged: whether to use the averaged weights. Default: use the averaged weights if
                there are any.

        Raises:
            UserError: the dataset is empty, its total weight is zero, ``averaged=True`` without
                averaged weights, or ``stop`` was called during the evaluation.
        """
        data = read_dataset_config(self._config, dataset, trains=False)
        if data.line is not None:
            once(self._say)(data.line)
        with self._naming_stragglers(), self._stoppable() as stops:
            values = self._evaluated(data, averaged, stops)
        if values is None:
            raise UserError("evaluate", f"stopped before the last row: {stops.reason}")
        return values

    @contextmanager
    def _naming_stragglers(self) -> Iterator[None]:
        """Name slow workers in one line at the end of the block, outside of a training loop.

        Inside a training loop, the loop names the workers at its end.
        """
        if self._stops is not None:
            yield
            return
        self._workers.stragglers = stragglers = Stragglers.none()
        try:
            yield
        finally:
            if (line := stragglers.summary()) is not None and not resolved(Shown, None).quiet:
                self._say(line)

    @contextmanager
    def _stoppable(self) -> Iterator[Stops]:
        """Yield the stop requests of the block; none inside a training loop: ``stop`` ends it."""
        stops = Stops()
        if self._stops is not None:
            yield stops
            return
        self._stops = stops
        try:
            yield stops
        finally:
            self._stops = None

    def _evaluated(
        self,
        data: DatasetConfig | None,
        averaged: bool | None,
        stops: Stops,
        called: str = "evaluate()",
    ) -> dict[str, float] | None:
        assert data is not None
        return evaluate(
            *(self._workers, self._setup, data),
            averaged=averaged,
            transport=None if self._loop is None else self._loop.transport,
            stops=stops,
            say=self._say,
            called=called,
        )

    def predict(
        self,
        dataset: Any,
        function: Function | None = None,
        *,
        to: str | Path | None = None,
        averaged: bool | None = None,
    ) -> Any:
        """Return the outputs of the model for all rows of a dataset, in the order of the dataset.

        See docs/metrics.md.

        Args:
            dataset: a map-style dataset, or a ``DataLoader`` of a map-style dataset.
            function: ``function(model, batch)`` returns tensors with the rows in dimension 0, lists
                with one item per row, or tuples and dicts of tensors and lists. Default: call the
                model.
            to: a folder to write the outputs to. Set ``to`` if the outputs do not fit into memory.
            averaged: whether to use the averaged weights. Default: use the averaged weights if
                there are any.

        Returns:
            The outputs of ``function`` for all rows; with ``to``, the path of the folder.

        Raises:
            OutputError: an output has no row dimension, or differs in kind between rows.
            UserError: the dataset is empty, ``averaged=True`` without averaged weights, ``to``
                holds other files, or ``stop`` was called during the prediction.
            OSError: the outputs cannot be written (disk full); no partial output is left.
        """
        data = read_dataset_config(self._config, dataset, trains=False)
        with self._naming_stragglers(), self._stoppable() as stops:
            return predict(
                *(self._workers, self._setup, data, function),
                to=None if to is None else Path(to),
                averaged=averaged,
                transport=None if self._loop is None else self._loop.transport,
                stops=stops,
                say=self._say,
            )

    def stop(self, reason: str = "stop() was called") -> None:
        """Finish the current step, then end the loop. Thread-safe.

        During an ``evaluate`` or ``predict`` outside a training loop, ``stop`` makes that call
        raise ``UserError``. After a ``stop`` in a callback no further update is made, except of
        shards already in progress under "async" and "bounded:K".
        """
        if self._stops is not None:
            self._stops.ask(reason)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of all current weights and buffers, plain and averaged.

        Raises:
            UserError: nothing was trained yet.
        """
        return weights.copied(self._setup.state)

    def take_weights(self, copies: dict[str, torch.Tensor]) -> None:
        """Set the model, and the averaged weights, to copies that ``weights`` returned."""
        weights.put_back(copies, self._setup.state)

    def load(self, which: str | Path = "best") -> Path:
        """Load the weights of a checkpoint into the model, and return the path of the checkpoint.

        Averaged weights are loaded too. A ``fit`` that resumes a run continues with the weights of
        the run, not with the loaded weights.

        Args:
            which: "best" (by ``Validation(best=)``) or "newest" checkpoint of ``run_dir``; or the
                path of a folder or file, as for ``load_weights``. Default: "best".

        Raises:
            CheckpointError: the checkpoint does not exist, is damaged or belongs to another model.
        """
        return weights.load(which, self.run_dir, self.model, self._setup, self._say)

    def save(self) -> Path:
        """Write a checkpoint of the current state, and return the directory of the checkpoint.

        Raises:
            UserError: ``run_dir`` is not set, or nothing was trained yet.
            SaveError: the checkpoint cannot be written; older checkpoints are unchanged.
        """
        setup, run_dir = self._setup, self._config.run_dir
        if run_dir.path is None or setup.state is None or setup.plan is None:
            raise UserError("save", "there is nothing to save", fix="set run_dir, and train first")
        refuse_half_an_update(setup.state)
        begin_fit(setup)
        with setup.lock.held(self._say):
            facts = self._facts(setup.state)
            path = save_now(run_dir, setup.state, facts, setup.lock.renew)
        setup.saved = (self.global_step, path)  # save again: the model may have changed since
        return path

    def _facts(self, state: Any) -> dict[str, Any]:
        return self._setup.facts(self._workers, state)
