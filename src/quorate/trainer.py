"""The Trainer class: the interface for training, evaluation and prediction.

A trainer has three parts. ``TrainerConfig`` (``training/config.py``) has the settings, each checked
once. ``WorkerGroup`` (``training/worker_group.py``) has the model and knows how workers are made.
``TrainingSetup`` (``training/setup.py``) has the state and the run directory, from loop to loop.
Workers are started by each loop and end with the loop. Worker processes run the user's script up to
the first loop, this constructor included.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.errors import UserError
from quorate.services.display.uncaught import fold_tracebacks
from quorate.settings import explain_keywords, resolved, setting
from quorate.training import weights
from quorate.training.config import (
    KEYWORDS_ELSEWHERE,
    Compute,
    Loading,
    RunDir,
    StopAfter,
    TrainerConfig,
    Workers,
    losses_of,
    optimize_of,
)
from quorate.training.evaluation import Function, evaluate, predict
from quorate.training.fit import Fit, save_now
from quorate.training.model import Models, make_model
from quorate.training.notices import once
from quorate.training.setup import TrainingSetup
from quorate.training.stop import Stops
from quorate.training.validation import FIT_KEYWORDS_ELSEWHERE, Validation
from quorate.training.worker_group import WorkerGroup

if TYPE_CHECKING:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from quorate.engines.worker_status import WorkerStatus
    from quorate.replica.phases.losses import Losses
    from quorate.services.report import Report
    from quorate.training.callbacks import Callback
    from quorate.training.config import Devices
    from quorate.training.optimizing.optimize import Optimizers


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

            The value under "loss" may be a dict of terms by name. A term, and a metric too, is a
            scalar or ``{"loss": mean, "weight": n}``, and is divided by its own total over the
            batch.

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

    @explain_keywords(KEYWORDS_ELSEWHERE)
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
        # Show errors of user code without this package's frames; before any user code runs.
        fold_tracebacks()
        # ``setting`` (a value) and ``resolved`` (a group of values) prefer what was typed at the
        # command ``quorate run`` to what the script passes.
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
        group = WorkerGroup(config, lambda: make_model(model, config.seed, losses))
        self.model = group.model_as_given
        self._setup = TrainingSetup(group)
        # In worker processes too: they receive trained weights from the coordinator, and have
        # frozen weights from here.
        if config.run_dir.init_from is not None:
            weights.load_weights(self.model, config.run_dir.init_from, self._setup.say)
        self._fit: Fit | None = None  # the current fit

    @property
    def run_dir(self) -> Path | None:
        """The run directory, or None if nothing is saved."""
        return self._setup.run_dir

    @property
    def workers(self) -> list[WorkerStatus]:
        """The current status of each worker; empty while no loop runs. Thread-safe."""
        transport = self._setup.transport
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
        data = self._setup.read_dataset_config(dataset)
        return self._setup.plan_of(data).updates_of(phase)

    @explain_keywords(FIT_KEYWORDS_ELSEWHERE)
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
        setup, validation_data = self._setup, None
        settings = None if validation is None else resolved(Validation, validation)
        data = setup.read_dataset_config(dataset, shuffle=shuffle)
        if settings is not None:
            validation_data = setup.read_dataset_config(
                settings.dataset, trains=False, name="validation"
            )
            if validation_data.loader_line is None:  # no loader: make batches as in training
                validation_data = validation_data._replace(loading=data.loading)
        for optimize in self._config.optimize.values():
            optimize.require_validation(is_there=settings is not None)
        limits = StopAfter(epochs=epochs, steps=steps, max_time_s=max_time_s)
        stop_after = resolved(StopAfter, limits)
        setup.workers.begin_loop(data, validation_data)  # a worker process does not return
        with closing(Fit(self, setup, callbacks, settings, validation_data)) as fit:
            self._fit = fit
            try:
                fit.train(data, stop_after)
            finally:
                self._fit = None

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
        setup = self._setup
        data = setup.read_dataset_config(dataset, shuffle=shuffle)
        stop_after = StopAfter(epochs=epochs, steps=steps)
        setup.workers.begin_loop(data)
        with (
            setup.reporting_stragglers(),
            setup.prepare_loop(data, stop_after, Stops()) as loop,
            loop.started() as reports,
        ):
            yield from reports

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
        setup = self._setup
        data = setup.read_dataset_config(dataset, trains=False)
        if data.loader_line is not None:
            once(setup.say)(data.loader_line)
        with setup.reporting_stragglers(), setup.stoppable() as stops:
            values = evaluate(setup, data, averaged, stops, "evaluate()")
        if values is None:
            raise UserError("evaluate", f"stopped before the last row: {stops.reason}")
        return values

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
        setup, folder = self._setup, None if to is None else Path(to)
        data = setup.read_dataset_config(dataset, trains=False)
        with setup.reporting_stragglers(), setup.stoppable() as stops:
            return predict(setup, data, function, folder, averaged, stops)

    def stop(self, reason: str = "stop() was called") -> None:
        """Finish the current step, then end the loop. Thread-safe.

        During an ``evaluate`` or ``predict`` outside a training loop, ``stop`` makes that call
        raise ``UserError``. After a ``stop`` in a callback no further update is made, except of
        shards already in progress under "async" and "bounded:K".
        """
        if self._setup.stops is not None:
            self._setup.stops.request(reason)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of all current weights and buffers, plain and averaged.

        Raises:
            UserError: nothing was trained yet.
        """
        return weights.copy_weights(self._setup.state)

    def take_weights(self, copies: dict[str, torch.Tensor]) -> None:
        """Set the model, and the averaged weights, to copies that ``weights`` returned."""
        weights.restore_weights(copies, self._setup.state)

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
        return weights.load(which, self._setup)

    def save(self) -> Path:
        """Write a checkpoint of the current state, and return the directory of the checkpoint.

        Raises:
            UserError: ``run_dir`` is not set, or nothing was trained yet.
            SaveError: the checkpoint cannot be written; older checkpoints are unchanged.
        """
        setup, state = self._setup, self._setup.state
        if setup.run_dir is None or state is None or setup.plan is None:
            raise UserError("save", "there is nothing to save", fix="set run_dir, and train first")
        state.require_whole_update()  # an exception may have interrupted the last update
        setup.restore_newest_weights()
        with setup.lock.held(setup.say):
            path = save_now(setup, state)
        setup.saved = (self.global_step, path)
        return path
