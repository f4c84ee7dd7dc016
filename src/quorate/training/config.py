"""The arguments of a trainer, each checked once. They never change afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quorate.coordination import rules
from quorate.data.loading import DatasetConfig, Loading
from quorate.engines.workers import Workers
from quorate.errors import SettingError
from quorate.replica.beside.asks import asks_for_at
from quorate.replica.beside.composed import Composed
from quorate.replica.compute import Compute
from quorate.replica.phases.losses import losses_of
from quorate.services.run_directory.settings import RunDir
from quorate.settings import (
    REQUIRED,
    AtResume,
    Option,
    Settings,
    at_least,
    between,
    declare,
    function,
    options,
)
from quorate.training.optimizing.optimize import Optimize, optimize_of
from quorate.training.other_trainers import KEYWORDS_OF_OTHER_TRAINERS

if TYPE_CHECKING:
    from quorate.coordination.plan import Plan
    from quorate.machine.devices import Devices
    from quorate.replica.loss import Loss
    from quorate.replica.whole_batch.gather import Gather

__all__ = [
    "KEYWORDS_ELSEWHERE",
    "OPTIONS",
    "Compute",
    "DatasetConfig",
    "Devices",
    "Loading",
    "Optimize",
    "RunDir",
    "StopAfter",
    "TrainerConfig",
    "Workers",
    "losses_of",
    "optimize_of",
]


def _a_loss(name: str, value: Loss) -> Loss:
    kind = value if hasattr(value, "__qualname__") else type(value)  # a function, or a module
    if kind.__module__ in ("torch.nn.functional", "torch.nn.modules.loss"):
        of_torch = f"{kind.__module__.removesuffix('.modules.loss')}.{kind.__qualname__}"
        call = of_torch if kind.__module__ == "torch.nn.functional" else f"{of_torch}()"
        fix = (
            "write def loss(model, batch): inputs, targets = batch; "
            f"return {call}(model(inputs), targets)"
        )
        raise SettingError(name, of_torch, "a function of a model and a batch", fix)
    if asks_for_at(value):
        return function(name, value, "of a model, a batch and at", 3)
    return function(name, value, "of a model and a batch", 2)


@dataclass(frozen=True, kw_only=True)
class StopAfter(Settings):
    """The arguments of ``Trainer.fit`` that decide when training ends; see ``Trainer.fit``."""

    epochs: int = declare(1, "passes over the dataset", check=at_least(1))
    steps: int | None = declare(None, "total number of updates", check=at_least(1))
    max_time_s: float | None = declare(
        None, "save and stop after this many seconds of training", kind=float, check=between(0)
    )

    def last_step(self, plan: Plan) -> int:
        """Return the number of updates at the end of training."""
        return self.epochs * plan.steps_per_epoch if self.steps is None else self.steps


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Settings):
    """The arguments of ``Trainer``; see there. Options of the command line are included."""

    loss: Loss = declare(REQUIRED, "loss function of a model and a batch", check=_a_loss)
    totals: Mapping[str, Any] | None
    batch_size: int = declare(
        REQUIRED, "rows per update, over all devices", check=at_least(1), at_resume=AtResume.REFUSED
    )
    devices: Devices = declare(
        REQUIRED,
        "devices to train on: cpu, cuda, cuda:0,cuda:1, mps; cuda:0+cuda:1: one worker on both",
        kind=str,
        metavar="LIST",
    )
    workers: Workers
    shards: int | None = declare(
        REQUIRED,
        "pieces that each batch is cut into; the result depends on this number",
        kind=int,
        check=at_least(1),
        at_resume=AtResume.REFUSED,
    )
    seed: int = declare(
        REQUIRED,
        "seed of row order, dropout, augmentation; at the command also of Python, NumPy, torch",
        kind=int,
        check=at_least(0, (1 << 64) - 1),
        at_resume=AtResume.REFUSED,
    )
    update: str = declare(
        REQUIRED,
        "update rule: sync, quorum:R, async or bounded:K",
        kind=str,
        check=lambda _, text: rules.parse(text).name,
        at_resume=AtResume.REFUSED,
    )
    precision: str = declare(
        REQUIRED,
        "numbers to compute in: fp32, tf32, bf32, bf16 or fp16",
        kind=str,
        at_resume=AtResume.SAID,
    )
    compute: Compute
    optimize: dict[str | None, Optimize]  # by phase; of a plain run, by None
    loading: Loading
    run_dir: RunDir

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards is not None and self.shards > self.batch_size:
            raise too_many_shards(self.shards, f"{self.batch_size} rows of a batch")
        if self.gather is not None:
            self._require_whole_batches()
        if self.has_phases:
            self._require_phases_fit()
        has_optimizer_list = any(each.has_optimizer_list for each in self.optimize.values())
        if has_optimizer_list and self.workers.servers is not None:
            expected = "none, as an update has several optimizers"
            raise SettingError("servers", self.workers.servers, expected, "leave them out")

    def _require_phases_fit(self) -> None:
        """Refuse settings that are not implemented for a loss with phases.

        Raises:
            SettingError: such a setting is used.
        """
        if rules.parse(self.update).by_shard:
            expected = (
                "sync or quorum:R, as the loss has phases, each of which is computed from what the "
                "one before it has made of the models"
            )
            fix = "leave it out, or take quorum:R where some workers are slow"
            raise SettingError("update", self.update, expected, fix)
        if self.workers.servers is not None:
            expected = "none, as the loss has phases"
            raise SettingError("servers", self.workers.servers, expected, "leave them out")

    @property
    def has_phases(self) -> bool:
        """True if there are several losses, one per phase."""
        return None not in self.optimize

    @property
    def gather(self) -> Gather | None:
        """The loss over the whole batch, if there is one.

        Raises:
            SettingError: a phase has such a loss.
        """
        from quorate.replica.whole_batch.gather import Gather  # imports torch

        loss: Any = self.loss
        if isinstance(loss, Composed) and any(
            isinstance(each, Gather) for each in loss.functions.values()
        ):
            expected = "one loss for all updates, as it is a Gather"
            raise SettingError("loss", "a phase with a Gather", expected, "leave the phases out")
        return self.loss if isinstance(self.loss, Gather) else None

    def _require_whole_batches(self) -> None:
        """Refuse settings that do not work with a loss over the whole batch.

        Raises:
            SettingError: the whole batch would never be available, or its two passes would differ.
        """
        if self.update != rules.Sync.name:
            expected = "sync, as a Gather's loss is over all shards of a batch"
            raise SettingError("update", self.update, expected, "leave it out")
        if self.compute.compile:
            expected = "False with a Gather, whose two passes would be compiled apart"
            raise SettingError("compile", True, expected, "leave it out")
        if self.workers.servers is not None:
            expected = "none, as the loss is a Gather"
            raise SettingError("servers", self.workers.servers, expected, "leave them out")

    def with_loading(self, loading: Loading) -> TrainerConfig:
        """Return a config with the loading settings of a ``DataLoader``."""
        return self if loading is self.loading else replace(self, loading=loading)

    def facts(self) -> dict[str, Any]:
        """Return the settings that a checkpoint records for a resume to compare."""
        groups: list[Settings] = [self, self.workers, self.compute, self.loading, self.run_dir]
        if None in self.optimize:  # else each phase records its own
            groups.append(self.optimize[None])
        return {
            option.recorded: option.seen(getattr(group, name))
            for group in groups
            for name, option in options(type(group)).items()
            if option.at_resume is not None
        }


def too_many_shards(shards: int, rows: str) -> SettingError:
    """Return the error for more shards than rows."""
    return SettingError("shards", shards, f"at most the {rows}", "choose fewer shards")


def _listed() -> list[Option]:
    direct = options(TrainerConfig, "Trainer")
    groups = {
        "workers": options(Workers),
        "compute": options(Compute),
        "optimize": options(Optimize),
        "loading": options(Loading),
        "run_dir": options(RunDir),
    }
    listed = []
    for name in TrainerConfig.__dataclass_fields__:
        listed += [direct[name]] if name in direct else [*groups.get(name, {}).values()]
    return [*listed, *options(StopAfter, "fit").values()]


# Every setting by its name on the command line, in the order of the help text.
OPTIONS: dict[str, Option] = {option.name: option for option in _listed()}

# Places of settings that once were keywords of ``Trainer``, belong to ``fit``, or are known from
# other trainers.
KEYWORDS_ELSEWHERE = {
    **KEYWORDS_OF_OTHER_TRAINERS,
    **{
        option.name: option.place
        for option in OPTIONS.values()
        if not option.place.startswith("Trainer")
    },
    "callbacks": "fit(callbacks=)",
    "validation": "fit(validation=)",
    "shuffle": "fit(shuffle=)",
}
