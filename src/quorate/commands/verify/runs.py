"""The runs to compare: the script on each number of workers, and in further ways.

The further ways are: on towers, stopped and resumed on another number of workers, and with a killed
worker process. The runs follow one another, each in a separate process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quorate.commands.child_run import NO_SAVES_S, child_run, last_error
from quorate.commands.verify import records
from quorate.commands.verify.verdict import Run, Way, verdict
from quorate.engines.selection import PROCESSES, TOWERS
from quorate.errors import UserError
from quorate.machine.environment import hash_seed
from quorate.services.checkpoints.files import checkpoint_of

SAVED_S = 60.0  # longest wait for the checkpoint of a stopped run


class OverLimitError(Exception):
    """The end of the time for a verification."""


class Limit:
    """The time limit of a verification, which starts at the construction.

    Args:
        seconds: limit of all runs together.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_at = time.monotonic() + seconds

    def require_time(self) -> None:
        """Raise an exception if the time is over.

        Raises:
            OverLimitError: the time is over.
        """
        if time.monotonic() >= self._ends_at:
            raise OverLimitError


class Program(NamedTuple):
    """The program to run, apart from the number of workers."""

    script: str
    module: str | None  # in the place of the script
    arguments: tuple[str, ...]
    options: dict[str, Any]  # of quorate run, by name
    updates: int  # number of updates to record
    ways: frozenset[Way]  # further ways beside the plain one
    limit: Limit
    say: Callable[[str], None]  # receives messages about the progress
    hash_seed: str | None = None  # PYTHONHASHSEED of a run; None: unchanged

    def hashing(self, seed: str | None) -> Program:
        """Return the program with another hash seed, unless the user has fixed one."""
        return self._replace(hash_seed=seed) if hash_seed() is None else self


class AllRuns(NamedTuple):
    """The finished runs, and notes about runs that were not made."""

    runs: list[Run]
    notes: list[str]
    left: str | None = None  # the run in which the limit was reached


def runs_of(program: Program, counts: Sequence[int], shards: int | None) -> AllRuns:
    """Run the script on each number of workers, the largest first, then in the further ways.

    The plain runs are returned in the order of ``counts``.

    Raises:
        UserError: the script cannot be trained, or the limit was reached before two runs were made.
    """
    # The run with the most workers is the first: if the script leaves the number of shards open,
    # the run has as many shards as workers, and all later runs get the same number.
    order = sorted(range(len(counts)), key=lambda n: -counts[n])
    plain: dict[int, Run] = {}
    # A fixed, different hash seed per run: the order of a set of strings differs between runs, and
    # is repeatable in the next verification.
    hashing = {n: program.hashing(str(number)) for number, n in enumerate(order, 1)}
    for n in order:
        again = sum(counts[before] == counts[n] for before in plain) > 0
        label = f"{_workers(counts[n])}{' again' if again else ''}"
        try:
            with _folder() as folder:
                run = _run(hashing[n], folder, {"workers": counts[n], "shards": shards}, label)
        except OverLimitError:
            if len(plain) < 2:
                raise _nothing_compared(program.limit, label) from None
            return AllRuns([plain[n] for n in sorted(plain)], [], label)
        run.refuse_a_mistake()
        shards = run.recording.facts.get("shards", shards)
        plain[n] = run
    runs = [plain[n] for n in range(len(counts))]
    sound = [run for run in runs if not run.failed and run.updates]
    if not sound:
        return AllRuns(runs, [])
    # The further runs use a single hash seed, so that they differ only in their way.
    program = hashing[runs.index(sound[0])]
    if not verdict(runs).is_same:
        runs += _under_one_hash_seed(program, sound, shards)
        note = "note: resumes, kills and towers are compared when this is mended"
        return AllRuns(runs, [note] if program.ways else [])
    if not program.ways:
        return AllRuns(runs, [])
    updates = min(run.updates for run in sound)
    further = _FurtherRuns(program._replace(updates=updates), sound, shards, runs, [], [])
    try:
        further.stopped()
        further.killed()
    except OverLimitError:
        return AllRuns(runs, further.notes, further.begun[-1])
    return AllRuns(runs, further.notes)


def _under_one_hash_seed(program: Program, sound: Sequence[Run], shards: int | None) -> list[Run]:
    """Repeat a differing run with the hash seed of the reference run.

    Returns:
        The run; empty if no run differs, hashes are not the cause, or the time is over.
    """
    reference, *others = sound
    parted = [run for run in others if run.parted(reference) is not None]
    is_repeatable = not any(t.is_finding for run in sound for t in run.recording.twice)
    if not parted or not is_repeatable or program.hash_seed is None:
        return []
    label = f"{parted[0].label} with the hash seed of {reference.label}"
    options = {"workers": parted[0].workers, "shards": shards}
    try:
        with _folder() as folder:
            return [_run(program, folder, options, label, Way.HASHED)]
    except OverLimitError:
        return []


def _nothing_compared(limit: Limit, label: str) -> UserError:
    return UserError(
        f"the limit of {limit.seconds:g} s was over in the run on {label}, before two runs could "
        "be compared; raise --limit, or lower --updates"
    )


class _FurtherRuns(NamedTuple):
    """The further runs of a script that can be trained."""

    program: Program
    plain: Sequence[Run]
    shards: int | None
    runs: list[Run]  # all runs so far
    notes: list[str]
    begun: list[str]  # labels of the further runs

    def stopped(self) -> None:
        """Run on towers, stop in the middle, and resume on another number of workers.

        Without towers, use the largest number of workers of the script's own engine.
        """
        most = max(run.workers for run in self.plain)
        has_towers = Way.TOWERS in self.program.ways and most > 1
        is_resumed = Way.RESUMED in self.program.ways and self.program.updates > 1
        stop = self.program.updates * 2 // 3 if is_resumed else self.program.updates
        cut = f" stopped after update {stop}" if is_resumed else ""
        if has_towers and not self._are_towers(most):
            with _folder() as folder:
                options = {"workers": most, "engine": TOWERS}
                label = f"{most} towers{cut}"
                run = self._run(folder, options, label, Way.TOWERS, stop)
                if run.code != 2 or run.updates:
                    self.runs.append(run)
                    if is_resumed and not run.failed:
                        self._resumed(folder, run)
                    return
                self.notes.append(f"note: it cannot be run on towers: {run.why}")
        if is_resumed:
            with _folder() as folder:
                label = f"{_workers(most)}{cut}"
                run = self._run(folder, {"workers": most}, label, Way.PLAIN, stop)
                self.runs.append(run)
                if not run.failed:
                    self._resumed(folder, run)

    def killed(self) -> None:
        """Run on worker processes, and kill one in the middle."""
        counts = [
            run.workers
            for run in self.plain
            if run.recording.facts.get("engine") == PROCESSES and run.workers > 1
        ]
        if Way.KILLED not in self.program.ways or not counts:
            return
        label = f"{_workers(max(counts))} with one killed"
        middle = self.program.updates // 2 + 1
        with _folder() as folder:
            options = {"workers": max(counts), "record_kill": middle}
            run = self._run(folder, options, label, Way.KILLED, self.program.updates)
            self.runs.append(run._replace(first=middle))

    def _are_towers(self, workers: int) -> bool:
        facts = [run.recording.facts for run in self.plain if run.workers == workers]
        return "engine" in self.program.options or any(f.get("engine") == TOWERS for f in facts)

    def _resumed(self, folder: Path, stopped: Run) -> None:
        if not checkpoint_of(folder / "run", stopped.updates).is_dir():
            self.notes.append(
                "note: no resume is compared: the script saved nothing when it was stopped"
            )
            return
        counts = sorted({run.workers for run in self.plain} - {stopped.workers})
        workers = next((count for count in counts if count > 1), (counts or [stopped.workers])[0])
        label = f"{_workers(workers)} resumed after update {stopped.updates}"
        left = self.program.updates - stopped.updates
        run = self._run(folder, {"workers": workers}, label, Way.RESUMED, left)
        after = run.recording.facts.get("resumed_after", stopped.updates)
        if after != stopped.updates:
            self.notes.append(
                f"note: no resume is compared: the script went on after update {after} when it was "
                f"stopped after update {stopped.updates}; does it begin anew (fresh)?"
            )
            return
        moved = run.recording.moved(stopped.updates)
        self.runs.append(run._replace(recording=moved, first=stopped.updates))

    def _run(
        self, folder: Path, options: dict[str, Any], label: str, way: Way, updates: int
    ) -> Run:
        program = self.program._replace(updates=updates)
        is_part = updates < self.program.updates
        saved = updates if is_part and way is not Way.RESUMED else None
        self.begun.append(label)
        run = _run(program, folder, {"shards": self.shards, **options}, label, way, saved)
        return run._replace(is_part=is_part)


def _run(
    program: Program,
    folder: Path,
    options: dict[str, Any],
    label: str,
    way: Way = Way.PLAIN,
    saved: int | None = None,
) -> Run:
    """Run the script, with a run directory in the folder that stays.

    Args:
        saved: the update whose checkpoint to wait for.
    """
    number = sum(1 for _ in folder.glob("records-*"))
    into = folder / f"records-{number}"
    into.mkdir()
    options = {
        **program.options,
        **options,
        "run_dir": folder / "run",
        "save_every_s": NO_SAVES_S,
        "record": into,
        "record_updates": program.updates,
    }
    output = folder / f"output-{number}"
    with output.open("wb") as file:
        saves = checkpoint_of(folder / "run", saved) if saved else None
        is_done = _recorded(into, saves, program.limit)
        words = program.script, program.module, program.arguments
        seed = {} if program.hash_seed is None else {"PYTHONHASHSEED": program.hash_seed}
        code = child_run(options, *words, file, is_done, seed)
    text = output.read_text(encoding="utf-8", errors="replace")
    workers = options["workers"]
    run = Run(label, workers, records.read(into), code, last_error(text), way)
    program.say(f"{run.label}: {run.summary()}")
    return run


def _recorded(into: Path, saves: Path | None, limit: Limit) -> Callable[[], bool]:
    """Return a function that tells whether a run has recorded enough, and saved its checkpoint."""
    since: list[float] = []

    def is_done() -> bool:
        limit.require_time()
        if not records.has_ended(into):
            return False
        since.append(time.monotonic())
        return saves is None or saves.is_dir() or since[-1] - since[0] > SAVED_S

    return is_done


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quorate-verify-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"
