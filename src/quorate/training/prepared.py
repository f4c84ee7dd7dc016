"""What a trainer has made ready, and the plan that follows from it.

A plan follows from the recipe, the workers and a number of rows: asking for one changes nothing.
Only a training loop pins the number of shards, where the recipe leaves it open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quorate.coordination.plan import Plan, PlanByShard
from quorate.data.source import length
from quorate.errors import SettingError
from quorate.services.checkpoints import files
from quorate.services.run_lock import RunLock
from quorate.training import resume
from quorate.training.crew import Crew
from quorate.training.facts import facts_of
from quorate.training.recipe import Recipe, too_many_shards
from quorate.training.state import State
from quorate.transports.collective import once


@dataclass
class Prepared:
    """What a trainer has made ready, from its construction on."""

    lock: RunLock  # of the run directory, while a loop is under way
    shards: int | None  # V; None as long as no loop was begun, and the recipe has none
    is_fresh: bool  # what is in the run directory is still to be moved aside
    state: State | None = None
    was_trained: bool = False  # the state was tried on a training shard, and restored
    plan: Plan | None = None  # of the last loop
    saved: tuple[int, Path] | None = None  # the newest checkpoint: its step and directory
    # Gives the state the weights that the model was given before there was one.
    put_loaded: Callable[[State], None] | None = None
    saved_shards: int | None = None  # V of the run whose weights are evaluated
    row_sample: dict[str, str | None] | None = None  # of the dataset, where checkpoints are saved

    @classmethod
    def of(cls, recipe: Recipe) -> Prepared:
        """Return what is ready when only settings are there."""
        path = recipe.run_dir.path
        lock = RunLock(None if path is None else Path(path))
        is_fresh = recipe.run_dir.fresh
        if is_fresh and path is not None:
            is_fresh = not once.is_done(_moving_aside(Path(path)))
        return cls(lock, recipe.shards, is_fresh)

    def begin(self, run_dir: Path, say: Callable[[str], None]) -> None:
        """Make sure that a run can be trained in its directory, which is locked; see ``resume``.

        Raises:
            SettingError: it cannot.
        """
        resume.begin(run_dir, say, fresh=self.is_fresh)
        if self.is_fresh:
            once.note(_moving_aside(run_dir))
        self.is_fresh = False

    def facts(self, crew: Crew, state: State) -> dict[str, Any]:
        """Return what a checkpoint says of the run, beside what it holds."""
        assert self.plan is not None
        return facts_of(crew, state, self.plan, self.row_sample)


def _moving_aside(run_dir: Path) -> str:
    return f"moving aside what is in {run_dir.absolute()}"


def planned(crew: Crew, prepared: Prepared, dataset: Any, *, shuffle: bool) -> Plan:
    """Return the plan of a training loop over a dataset; changes nothing.

    Raises:
        DataError: it is no map-style dataset, or is empty.
        SettingError: there are fewer rows than shards, or fewer shards than the rule needs.
    """
    recipe, rule, rows = crew.recipe, crew.rule, length(dataset)
    shards = prepared.shards
    if shards is None:
        newest = newest_checkpoint(crew, prepared)
        workers = min(crew.least_workers, recipe.batch_size, rows)
        shards = workers if newest is None else int(newest.record["shards"])
    if shards > rows:
        raise too_many_shards(shards, f"{rows} rows of the dataset")
    if shards < rule.least_shards:
        expected = f"at most the {shards} shards of a batch"
        raise SettingError("update", rule.name, expected, "choose a smaller quorum, or more shards")
    kind = PlanByShard if rule.by_shard else Plan
    return kind(
        rows=rows,
        batch_size=min(recipe.batch_size, rows),
        shards=shards,
        seed=recipe.seed,
        shuffle=shuffle,
        order=recipe.loading.order,
    )


def newest_checkpoint(crew: Crew, prepared: Prepared) -> files.Sound | None:
    """Return the checkpoint to go on from."""
    path, facts = crew.recipe.run_dir.path, crew.recipe.facts()
    if path is None or prepared.is_fresh:
        return None
    if crew.recipe.shards is None:
        del facts["shards"]  # it goes on with those of the checkpoint
    return files.find(Path(path), partial(resume.require_same_run, facts=facts))
