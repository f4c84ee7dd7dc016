"""Recipe: what a trainer was asked for, each setting checked once. Nothing of it ever changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quorate.coordination import rules
from quorate.data.loading import Loading
from quorate.errors import SettingError
from quorate.replica.compute import Compute
from quorate.services.run_dir import RunDir
from quorate.settings import AtResume, Option, Settings, a_function, about, at_least, options
from quorate.training.duration import Duration
from quorate.training.optimizing.optimize import Optimize
from quorate.transports.workers import Workers

if TYPE_CHECKING:
    from quorate.machine.devices import Devices
    from quorate.replica.loss import Loss

__all__ = ["OPTIONS", "Compute", "Devices", "Loading", "Optimize", "Recipe", "RunDir", "Workers"]


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """The arguments of ``Trainer``; see there. What the command overrides is in it already."""

    loss: Loss = field(metadata=about("the loss", check=a_function("of a model and a batch", 2)))
    totals: Mapping[str, Any] | None
    batch_size: int = field(
        metadata=about("rows per update", check=at_least(1), at_resume=AtResume.REFUSED)
    )
    devices: Devices = field(
        metadata=about("cpu, cuda, cuda:0,cuda:1, cuda:0+cuda:1, mps", kind=str, metavar="LIST")
    )
    workers: Workers
    shards: int | None = field(
        metadata=about(
            "pieces of a batch; the result depends on it",
            kind=int,
            check=at_least(1),
            at_resume=AtResume.REFUSED,
        )
    )
    seed: int = field(
        metadata=about(
            "of rows, dropout, augmentation; of Python's, NumPy's and torch's generators",
            kind=int,
            check=at_least(0, (1 << 64) - 1),  # what torch's generators take
            at_resume=AtResume.REFUSED,
        )
    )
    update: str = field(
        metadata=about(
            "the rule: sync, quorum:R, async, bounded:K",
            kind=str,
            check=lambda _, text: rules.parse(text).name,
            at_resume=AtResume.REFUSED,
        )
    )
    precision: str = field(
        metadata=about("fp32, tf32, bf32, bf16 or fp16", kind=str, at_resume=AtResume.SAID)
    )
    compute: Compute
    optimize: Optimize
    loading: Loading
    run_dir: RunDir

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards is not None and self.shards > self.batch_size:
            raise too_many_shards(self.shards, f"{self.batch_size} rows of a batch")

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint has of the settings that a resume compares."""
        groups = (self, self.workers, self.compute, self.optimize, self.loading, self.run_dir)
        return {
            option.recorded: option.seen(getattr(group, name))
            for group in groups
            for name, option in options(type(group)).items()
            if option.at_resume is not None
        }


def too_many_shards(shards: int, rows: str) -> SettingError:
    """Return the error of more shards than rows."""
    return SettingError("shards", shards, f"at most the {rows}", "choose fewer shards")


def _listed() -> list[Option]:
    direct = options(Recipe, "Trainer")
    groups = {
        "workers": options(Workers),
        "compute": options(Compute),
        "optimize": options(Optimize),
        "loading": options(Loading),
        "run_dir": options(RunDir),
    }
    listed = []
    for name in Recipe.__dataclass_fields__:
        listed += [direct[name]] if name in direct else [*groups.get(name, {}).values()]
    return [*listed, *options(Duration, "fit").values()]


# Every setting by its name at the command, in the order of a help text.
OPTIONS: dict[str, Option] = {option.name: option for option in _listed()}
