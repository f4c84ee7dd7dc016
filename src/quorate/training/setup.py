"""The setup of a trainer from its construction on, and the resulting plan.

A plan follows from settings, workers and a number of rows: computing a plan changes nothing.
Only a training loop fixes the number of shards, where the settings leave the number open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.coordination.epochs import SHORT, Course
from quorate.coordination.plan import Plan, PlanByShard
from quorate.data import dataloader
from quorate.data.source import length
from quorate.engines.collective.rank_place import note_done, was_done_before
from quorate.errors import SettingError
from quorate.replica.phases.losses import PhaseLosses
from quorate.services.checkpoints import files
from quorate.services.run_lock import RunLock
from quorate.settings import switch
from quorate.training import resume
from quorate.training.config import DatasetConfig, TrainerConfig, too_many_shards
from quorate.training.facts import facts_of
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup

if TYPE_CHECKING:
    import torch

__all__ = ["DatasetConfig", "TrainingSetup", "newest_checkpoint", "planned", "read_dataset_config"]


@dataclass
class TrainingSetup:
    """The parts of a trainer that outlive a training loop, from construction on."""

    lock: RunLock  # lock of the run directory, held during a loop
    shards: int | None  # V; None before the first loop, unless set by the user
    is_fresh: bool  # the content of the run directory is to be moved aside
    state: State | None = None
    was_trained: bool = False  # the state was tried on a training shard, and restored
    plan: Plan | None = None  # of the last loop
    course: Course | None = None  # of a run whose checkpoint was read for an evaluation
    saved: tuple[int, Path] | None = None  # the newest checkpoint: its step and directory
    # Puts weights into the state that were loaded into the model before there was a state.
    put_loaded: Callable[[State], None] | None = None
    saved_shards: int | None = None  # V of the run whose weights are evaluated
    # The newest weights of the run, while the model has the weights of an earlier fit.
    newest_weights: dict[str, torch.Tensor] | None = None
    # The record of the resumed checkpoint, until the fit that saved the checkpoint is reached.
    resumed: dict[str, Any] | None = None
    row_sample: dict[str, str | None] | None = None  # of the dataset, where checkpoints are saved

    @classmethod
    def of(cls, config: TrainerConfig) -> TrainingSetup:
        """Return the setup of a trainer that has only settings."""
        path = config.run_dir.path
        lock = RunLock(None if path is None else Path(path))
        is_fresh = config.run_dir.fresh
        if is_fresh and path is not None:
            is_fresh = not was_done_before(_moving_aside(Path(path)))
        return cls(lock, config.shards, is_fresh)

    def begin(self, run_dir: Path, say: Callable[[str], None]) -> None:
        """Check that a run can be trained in its directory, which is locked; see ``resume``.

        Raises:
            SettingError: the directory cannot be used.
        """
        resume.begin(run_dir, say, fresh=self.is_fresh)
        if self.is_fresh:
            note_done(_moving_aside(run_dir))
        self.is_fresh = False

    def course_between(self, global_step: int) -> Course:
        """Return the position in its run of an evaluation between two updates."""
        if self.plan is not None:
            stands_at = (global_step, self.plan.epoch(global_step))
            return Course(self.plan.course.last_step, stands_at)
        return self.course or Course(0, (global_step, 0))

    def facts(self, workers: WorkerGroup, state: State) -> dict[str, Any]:
        """Return the facts about the run that a checkpoint saves beside tensors."""
        assert self.plan is not None
        return facts_of(workers, state, self.plan, self.row_sample)


def _moving_aside(run_dir: Path) -> str:
    return f"moving aside what is in {run_dir.absolute()}"


def read_dataset_config(
    config: TrainerConfig,
    given: Any,
    *,
    shuffle: bool | None = None,
    trains: bool = True,
    name: str = "dataset",
) -> DatasetConfig:
    """Return the dataset and settings in the user's argument, a dataset or a loader.

    Args:
        shuffle: the user's choice; None: no choice.
        trains: whether the dataset is for training, not for evaluation.
        name: name of the argument, for messages.

    Raises:
        SettingError: the loader cannot be read by position.
    """
    shuffle = None if shuffle is None else switch("shuffle", shuffle)
    size = config.batch_size if trains else None
    return dataloader.read_dataset_config(
        given, config.loading, shuffle=shuffle, batch_size=size, name=name
    )


def planned(workers: WorkerGroup, setup: TrainingSetup, data: DatasetConfig) -> Plan:
    """Return the plan of a training loop over a dataset; changes nothing.

    Raises:
        DataError: the argument is no map-style dataset, or is empty.
        SettingError: there are fewer rows than shards, or fewer shards than the rule needs.
    """
    config, rule, rows = (
        workers.config.with_loading(data.loading),
        workers.rule,
        length(data.dataset),
    )
    sampling, dealt = data.loading.sampling, rows
    if sampling is not None:
        sampling.require_rows(rows)
        dealt = sampling.rows
        if not data.shuffle:
            fix = "leave shuffle out: rows come as they are drawn"
            raise SettingError("shuffle", data.shuffle, "True with Loading(sampling=)", fix)
    shards = setup.shards
    if shards is None:
        newest = newest_checkpoint(config, setup)
        count = min(workers.least_workers, config.batch_size, dealt)
        if newest is None and config.compute.strict and workers.keeps_bits(count):
            expected = "a number: a strict run does not take it from the number of workers"
            raise SettingError("shards", None, expected, f"pass shards={count}")
        shards = count if newest is None else int(newest.record["shards"])
    if shards > dealt:
        of = "the dataset" if sampling is None else "an epoch"
        raise too_many_shards(shards, f"{dealt} rows of {of}")
    if shards < rule.least_shards:
        expected = f"at most the {shards} shards of a batch"
        raise SettingError("update", rule.name, expected, "choose a smaller quorum, or more shards")
    kind = PlanByShard if rule.by_shard else Plan
    return kind(
        rows=rows,
        batch_size=min(config.batch_size, dealt),
        shards=shards,
        seed=config.seed,
        shuffle=data.shuffle,
        order=config.loading.order,
        last=config.loading.last or SHORT,
        sampling=sampling,
        round=config.loss.round if isinstance(config.loss, PhaseLosses) else None,
    )


def newest_checkpoint(config: TrainerConfig, setup: TrainingSetup) -> files.ValidCheckpoint | None:
    """Return the checkpoint to resume from."""
    path, facts = config.run_dir.path, config.facts()
    if path is None or setup.is_fresh:
        return None
    if config.shards is None:
        del facts["shards"]  # the run resumes with the shards of the checkpoint
    return files.find(Path(path), partial(resume.require_same_run, facts=facts))
