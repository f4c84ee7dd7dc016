"""The facts of a run directory without its tensors: the columns of `quorate runs`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from quorate.commands.newest_metrics import newest_update
from quorate.errors import CheckpointError, UserError
from quorate.machine.text import printable
from quorate.services.checkpoints import files
from quorate.services.run_directory.status import (
    FINISHED,
    KILLED,
    NAME,
    RUNNING,
    STOPPED,
    status_of,
)

MARKS = ("checkpoints", NAME, "metrics.jsonl", "run.lock")  # any of these marks a run directory
NO_RUN = re.compile(r"\..*|aside-\d+|__pycache__|node_modules")  # folders to skip
MOST_DEPTH = 6
EMPTY, DAMAGED = "empty", "damaged"


class RunFacts(NamedTuple):
    """The facts of a run directory."""

    path: str  # relative to the searched folder
    state: str  # running, finished, stopped, failed, killed, elsewhere; empty, damaged
    global_step: int | None  # of the newest known update
    last_step: int | None  # number of updates at the end of the run
    saved_step: int | None  # of the newest checkpoint
    loss: float | None  # of the newest update
    best: dict[str, Any] | None  # metric, value and global_step, by Validation(best=)
    at: float | None  # seconds since the epoch: the newest sign of the run
    why: str  # why the run ended, or the fault


class RunListing(NamedTuple):
    """The run directories below a folder."""

    runs: list[RunFacts]
    unread: list[str]  # unreadable folders, with the reason


def runs_below(folder: Path) -> RunListing:
    """Find run directories in a folder and below. A damaged run has a line about the damage.

    A link to a folder is followed as an argument, but not during the search.
    """
    unread: list[str] = []
    runs = [facts_of(path, folder) for path in _run_dirs(folder, MOST_DEPTH, unread)]
    return RunListing(runs, unread)


def _run_dirs(folder: Path, depth: int, unread: list[str]) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        unread.append(f"{printable(folder)}: {error.strerror or error}")
        return
    if any(entry.name in MARKS for entry in inside):
        yield folder
        return
    for entry in inside:
        with suppress(OSError):  # the folder is gone
            is_folder = entry.is_dir(follow_symlinks=False)
            if depth and is_folder and not NO_RUN.fullmatch(entry.name):
                yield from _run_dirs(Path(entry.path), depth - 1, unread)


def facts_of(path: Path, folder: Path) -> RunFacts:
    """Return the facts of a run directory, with its path relative to a folder."""
    signs = [_changed_at(path / "metrics.jsonl")]
    # 1. Find the newest checkpoint with a readable record; tensors are not read.
    record: dict[str, Any] | None = None
    wrong = ""
    try:
        for checkpoint, _ in files.newest_first(path):
            try:
                record = files.record_of(checkpoint)
                break
            except CheckpointError as error:
                wrong = wrong or str(error)
    except (UserError, OSError) as error:
        wrong = str(error)
    # 2. Read the end of the log, and the run's status.
    update = newest_update(path / "metrics.jsonl")
    step = None if update is None else update.global_step
    status = status_of(path)
    last = saved = best = signed = None
    if record is not None:
        saved, last, best = record["global_step"], record.get("last_step") or None, _best(record)
        signs.append(record["saved_at"])
    if status is not None:
        signs.append(status.at)
        signed, last = status.global_step, status.last_step
    steps = [n for n in (step, saved, signed) if n is not None]
    newest = max(steps, default=None)
    # 3. Decide the state, also of an old run without a status.
    if status is not None:
        state, why = status.state, status.reason
    elif newest is None:
        state, why = EMPTY, ""
    elif saved is None or newest > saved:
        state, why = KILLED, ""
    else:
        state, why = (FINISHED if last is not None and saved >= last else STOPPED), ""
    if record is None and wrong:
        state, why = (state if state == RUNNING else DAMAGED), wrong
    if state == KILLED and newest is not None:
        lost = newest - (saved or 0)
        why = f"step {saved:,} is saved" if saved is not None else "nothing is saved"
        why += f", {lost:,} {'update' if lost == 1 else 'updates'} to do again" if lost else ""
    known = [sign for sign in signs if sign is not None]
    return RunFacts(
        path=_below(path, folder),
        state=state,
        global_step=newest,
        last_step=last,
        saved_step=saved,
        loss=None if update is None else update.loss,
        best=best,
        at=max(known, default=None),
        why=why,
    )


def _best(record: dict[str, Any]) -> dict[str, Any] | None:
    best: dict[str, Any] | None = record["account"]["best"]
    return best


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _below(path: Path, folder: Path) -> str:
    return printable(path.relative_to(folder)) if path != folder else "."
