"""The trainer: what a user writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.errors import UserError
from quorate.services.display.uncaught import fold_tracebacks
from quorate.settings import named, resolved, setting
from quorate.training.crew import Crew
from quorate.training.duration import Duration
from quorate.training.earlier_fits import begin_fit
from quorate.training.ending import weights
from quorate.training.evaluate import evaluate
from quorate.training.fit import Fit, Services, save_now
from quorate.training.loop import Loop
from quorate.training.model import Models, make_model
from quorate.training.predicting.predict import Function, predict
from quorate.training.prepare import Prepared, planned, prepare, refuse_half_an_update, taken
from quorate.training.probing.before_workers import looking
from quorate.training.recipe import (
    ELSEWHERE,
    Compute,
    Loading,
    Recipe,
    RunDir,
    Taken,
    Workers,
    losses_of,
    optimize_of,
)
from quorate.training.stop import Stops
from quorate.training.validation import ELSEWHERE_IN_FIT, Validation

if TYPE_CHECKING:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from quorate.replica.phases.losses import Losses
    from quorate.services.report import Report
    from quorate.training.callbacks import Callback
    from quorate.training.optimizing.choices import Optimizers
    from quorate.training.recipe import Devices
    from quorate.transports.worker_status import WorkerStatus


class Trainer:
    """Trains one model on every device, with the same bits on any number of them.

    Args:
        model: a module, or a function without arguments that makes one. A function is called under
            ``seed``, so that the initial weights follow from it too. Or a dict of several, which
            become one ``torch.nn.ModuleDict``: see docs/several-models.md.
        loss: ``loss(model, batch)`` returns the mean loss over the batch's rows, a scalar tensor,
            or a dict with it under "loss", further scalars under any names (metrics), and "weight"
            where the means are over n tokens or pixels and not over rows. It must use the model it
            is given. With a third parameter, ``loss(model, batch, at)``, it is told where in the
            run the shard is: see docs/state-outside-the-model.md. Or a dict of several, from the
            phase of an update to its loss; or a list of ``(phase, loss)`` or ``Phase(...)``, in
            which a phase may come more than once. One that compares rows with others: ``Gather``.
        totals: what is counted and not averaged: intersection over union, BLEU. From a name, under
            which the loss function may return integers of any one shape (in evaluation mode alone,
            if it likes), to a function that gets the sum over all shards, int64, exact, once per
            evaluation, and per update if there are some; it returns a number, or several by names.
            Or to ``Collect(...)``, or a metric of torchmetrics: see docs/metrics.md.
        optimizer: from a list of parameters to a torch optimizer; or ``Optimize(...)``, which also
            has a schedule, clipping and averaged weights. Of several losses, a dict by phase.
        batch_size: rows per update, over all devices.
        shards: V, into how many pieces a batch is cut. The result depends on it, and on the number
            of devices not at all. Default: the number of workers of the first run. More shards on
            one device need less memory (gradient accumulation); more devices than shards are
            substitutes.
        seed: of the order of rows, of dropout, of augmentation.
        devices: torch devices or their names, as a list or separated by commas. Default: every
            visible GPU, else one CPU worker per core, at most 8.
        workers: how many workers, dealt over the devices in turn (default: one per entry); or
            ``Workers(...)``, which also says how they are reached and what each may take.
        update: the update rule. "sync": all shards of a batch. "quorum:R": the first R of them, the
            rest is dropped. "async": each shard is an update of its own, applied as it comes.
            "bounded:K": likewise, but none from parameters more than K updates old. The bits depend
            on timing but for "sync"; which to choose, and the learning rate: docs/update-rules.md.
        precision: "fp32", with TensorFloat-32 off; "tf32"; "bf16", which keeps float32 parameters
            and computes with bfloat16 copies of them; "fp16" likewise, on GPUs. The bits depend on
            it: see docs/precision.md.
        compute: ``Compute(...)``: compiled or not, and where operators run.
        loading: ``Loading(...)``: how rows become batches.
        run_dir: where state and metrics are saved, and a run that was interrupted is resumed from;
            or ``RunDir(...)``, which also says how often. Without it nothing is written.

    Raises:
        SettingError: a value cannot work; nothing was started.
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
        fold_tracebacks()  # before anything is refused, and before any code of the user's runs
        losses = losses_of(loss, totals)
        self._recipe = recipe = Recipe(
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
        self._say: Callable[[str], None] = logging.getLogger("quorate").warning
        self._crew = Crew(recipe, lambda: make_model(model, recipe.seed, losses))
        self.model = self._crew.given
        if recipe.run_dir.init_from is not None:  # in workers too: frozen weights are theirs
            weights.load_weights(self.model, recipe.run_dir.init_from, self._say)
        self._prepared = Prepared.of(recipe)
        self._stops: Stops | None = None  # of the loop, evaluation or prediction under way
        self._loop: Loop | None = None  # under way
        self._fit: Fit | None = None  # under way

    @property
    def run_dir(self) -> Path | None:
        """Where the run is saved."""
        path = self._recipe.run_dir.path
        return None if path is None else Path(path)

    @property
    def workers(self) -> list[WorkerStatus]:
        """What each worker of the loop under way is at; empty between loops. Any thread may ask."""
        transport = None if self._loop is None else self._loop.transport
        return [] if transport is None else transport.status()

    @property
    def global_step(self) -> int:
        """Updates applied so far."""
        return 0 if self._prepared.state is None else self._prepared.state.global_step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, which may be changed between updates; empty before any."""
        return [] if self._prepared.state is None else self._prepared.state.optimizer.param_groups

    @property
    def averaged_model(self) -> torch.nn.Module | None:
        """A copy of the model with the averaged weights; None without ``Optimize(ema_decay=)``."""
        return None if self._prepared.state is None else self._prepared.state.averaged_model()

    @property
    def summaries(self) -> SummaryWriter | None:
        """Where callbacks put images and text while ``fit`` runs; None without summaries."""
        return None if self._fit is None else self._fit.summaries

    def updates_per_epoch(self, dataset: Any, phase: str | None = None) -> int:
        """Return how many updates a pass over the dataset takes: each a shard under async, bounded.

        A schedule is made when training begins, and so may ask the trainer that it belongs to.

        Args:
            dataset: a map-style dataset.
            phase: count those of this phase alone, which its schedule counts.
        """
        data = taken(self._recipe, dataset)
        return planned(self._crew, self._prepared, data).updates_of(phase)

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
        """Train until so many epochs are done, counted from the first run in ``run_dir``.

        Goes on from the newest sound checkpoint in ``run_dir``. Shows progress, writes
        metrics.jsonl and TensorBoard's summaries, evaluates ``validation``, and saves the state now
        and then and at the end: also after Ctrl-C or SIGTERM (the step under way is finished, then
        the process leaves as it would have; a second one stops at once), ``max_time_s``, and an
        exception of the user's code. SIGUSR1 saves and goes on.

        Args:
            dataset: a map-style dataset, or a ``DataLoader``, of which is taken what is in it: its
                dataset, order, ``collate_fn``, ``num_workers`` and ``drop_last``. A line says so.
            epochs: passes over it in all.
            steps: updates in all; if given, ``epochs`` does not count.
            validation: a map-style dataset, a ``DataLoader``, or ``Validation(...)``, which also
                says how often it is evaluated, and which metric makes a checkpoint the best.
            shuffle: whether each epoch has an order of its own; else the dataset's. Default: as a
                ``DataLoader`` does, else True.
            callbacks: what you want to happen besides; see ``Callback``.
            max_time_s: seconds after the first shard was begun: then the step under way is
                finished, and all is saved.

        Raises:
            UserError: something cannot work; no update was made.
            NotFiniteError: a loss or gradient was not finite; that update was not made.
            SaveError: the last update cannot be saved, an ``OSError`` too.
            KeyboardInterrupt: after Ctrl-C, with everything saved.
            SystemExit: after SIGTERM, likewise.
        """
        chosen = None if validation is None else resolved(Validation, validation)
        data, rows = taken(self._recipe, dataset, shuffle=shuffle), None
        if chosen is not None:
            rows = taken(self._recipe, chosen.dataset, trains=False, name="validation")
            if rows.line is None:  # a plain dataset: its batches are made like those of training
                rows = rows._replace(loading=data.loading)
        self._recipe.optimize.require_validation(is_there=chosen is not None)
        duration = resolved(Duration, Duration(epochs=epochs, steps=steps, max_time_s=max_time_s))
        self._crew.begin_loop(data, rows)
        services = Services(
            self._recipe.run_dir,
            self._prepared.lock.renew,
            duration.max_time_s,
            callbacks,
            self._crew.replicas.totals,
            chosen,
            partial(self._evaluated, rows, None),
            looking(self._crew, chosen, rows, callbacks),
        )
        say = self._say
        with closing(Fit(self, services, self._facts)) as fit:
            self._fit, self._say = fit, fit.say
            try:
                fit.train(lambda stops: self._looping(data, duration, stops, services.look))
            finally:
                self._prepared.saved = fit.saved or self._prepared.saved
                self._fit, self._say = None, say

    def updates(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool | None = None,
    ) -> Generator[Report]:
        """Yield a report per update: the loop of ``fit`` as a generator. Nothing is saved.

        Workers wait while the caller has a report: the model may be read and changed. Leaving it
        ends them; another loop goes on at the next update. Arguments and errors as for ``fit``.
        """
        self._recipe.optimize.require_validation(is_there=False)
        data = taken(self._recipe, dataset, shuffle=shuffle)
        duration = Duration(epochs=epochs, steps=steps)
        self._crew.begin_loop(data)
        with self._looping(data, duration, Stops()) as loop:
            yield from loop.reports

    @contextmanager
    def _looping(
        self,
        data: Taken,
        duration: Duration,
        stops: Stops,
        look: Callable[..., None] = lambda *_: None,
    ) -> Iterator[Loop]:
        if self._stops is not None:
            raise UserError(
                "updates", "another loop over updates is still open", fix="close that loop first"
            )
        begun = self._crew, self._prepared, data, duration
        preparing = prepare(*begun, stops=stops, say=self._say, look=look)
        self._stops = stops
        try:
            with preparing as self._loop:
                yield self._loop
        finally:
            self._stops = self._loop = None

    def evaluate(self, dataset: Any, *, averaged: bool | None = None) -> dict[str, float]:
        """Return means of loss and metrics, and finished totals, over every row, each once.

        Args:
            dataset: a map-style dataset, or a ``DataLoader`` of one.
            averaged: whether to use the averaged weights. Default: if there are any.

        Raises:
            UserError: the dataset is empty, its weight is zero, nothing is averaged, or ``stop``
                was called meanwhile.
        """
        data = taken(self._recipe, dataset, trains=False)
        if data.line is not None:
            self._say(data.line)
        with self._stoppable() as stops:
            values = self._evaluated(data, averaged, stops)
        if values is None:
            raise UserError("evaluate", f"stopped before the last row: {stops.reason}")
        return values

    @contextmanager
    def _stoppable(self) -> Iterator[Stops]:
        """Yield what ``stop`` asks within the block: nothing inside a loop, which it ends."""
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
        self, data: Taken | None, averaged: bool | None, stops: Stops
    ) -> dict[str, float] | None:
        assert data is not None
        return evaluate(
            *(self._crew, self._prepared, data),
            averaged=averaged,
            transport=None if self._loop is None else self._loop.transport,
            stops=stops,
            say=self._say,
        )

    def predict(
        self,
        dataset: Any,
        function: Function | None = None,
        *,
        to: str | Path | None = None,
        averaged: bool | None = None,
    ) -> Any:
        """Return what the model returns for every row, in order. See docs/prediction.md.

        Args:
            function: ``function(model, batch)`` returns tensors with the rows in dimension 0, lists
                with an item per row, and tuples and dicts of such. Default: the model.
            to: a folder that the outputs are written to, where they are larger than memory.
            averaged: as for ``evaluate``.

        Returns:
            What the function returned, of all rows; with ``to`` that folder.

        Raises:
            OutputError: what it returned is not by row, or not alike for all rows.
            UserError: the dataset is empty, nothing is averaged, ``to`` has other things in it, or
                ``stop`` was called meanwhile.
            OSError: the disk is full; nothing is left of it.
        """
        data = taken(self._recipe, dataset, trains=False)
        with self._stoppable() as stops:
            return predict(
                *(self._crew, self._prepared, data, function),
                to=None if to is None else Path(to),
                averaged=averaged,
                transport=None if self._loop is None else self._loop.transport,
                stops=stops,
                say=self._say,
            )

    def stop(self, reason: str = "stop() was called") -> None:
        """Finish the step under way, if there is one, then end the loop. Any thread may call it.

        An ``evaluate`` or ``predict`` that is under way outside a loop raises ``UserError``.
        In a callback no other is made, but for shards under way under async and bounded.
        """
        if self._stops is not None:
            self._stops.ask(reason)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of all weights and buffers as they are; ``UserError`` before training."""
        return weights.copied(self._prepared.state)

    def take_weights(self, copies: dict[str, torch.Tensor]) -> None:
        """Give the model, and the averaged weights, what ``weights`` returned."""
        weights.put_back(copies, self._prepared.state)

    def load(self, which: str | Path = "best") -> Path:
        """Give the model, and the averaged weights, those of a checkpoint; return where it lies.

        A ``fit`` that resumes a run goes on with the weights of the run.

        Args:
            which: "best", by ``Validation(best=)``, or "newest" of ``run_dir``; or a folder or file
                as for ``load_weights``.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged or another model's.
        """
        return weights.load(which, self.run_dir, self.model, self._prepared, self._say)

    def save(self) -> Path:
        """Write a checkpoint of the state as it is, and return its directory.

        Raises:
            UserError: there is no ``run_dir``, or nothing was trained yet.
            SaveError: it cannot be written; the older checkpoints are as they were.
        """
        prepared, run_dir = self._prepared, self._recipe.run_dir
        if run_dir.path is None or prepared.state is None or prepared.plan is None:
            raise UserError("save", "there is nothing to save", fix="set run_dir, and train first")
        refuse_half_an_update(prepared.state)
        begin_fit(prepared)
        with prepared.lock.held(self._say):
            facts = self._facts(prepared.state)
            path = save_now(run_dir, prepared.state, facts, prepared.lock.renew)
        prepared.saved = (self.global_step, path)  # again: the model may be another since
        return path

    def _facts(self, state: Any) -> dict[str, Any]:
        return self._prepared.facts(self._crew, state)
