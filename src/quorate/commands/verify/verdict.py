"""The verdict over several runs of a script. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from quorate.commands.verify import words
from quorate.commands.verify.differences import (
    BATCH,
    ROW,
    ROWS,
    Difference,
    alike,
    changed_rows,
    first_difference,
)
from quorate.commands.verify.records import Recording
from quorate.errors import UserError
from quorate.replica.witness.calls import CallRecord, culprit, paired


class Way(Enum):
    """The way of a run beside its number of workers. The value completes "it shows"."""

    PLAIN = ""
    TOWERS = "on towers"  # threads of one process; possibly stopped early
    RESUMED = "after a resume"
    KILLED = "after a worker was killed"
    HASHED = "with another hash seed"  # PYTHONHASHSEED of the run in the comparison


class Run(NamedTuple):
    """A finished run."""

    label: str  # "2 workers"
    workers: int
    recording: Recording
    code: int  # exit code
    error: str  # last line of output of a failed run: usually the error
    way: Way = Way.PLAIN
    first: int = 0  # the update after which the run continues
    is_part: bool = False  # whether the run was resumed, or was stopped for a resume

    @property
    def failed(self) -> bool:
        """True if the run ended before enough was recorded."""
        return self.recording.end is None or bool(self.recording.end.error)

    @property
    def why(self) -> str:
        """The reason of the failure: a script's own exit code may be the only information."""
        return self.error if self.code in (1, 2) else f"exit code {self.code}; {self.error}"

    def refuse_a_mistake(self) -> None:
        """Refuse a run that failed before training: all other runs would fail too.

        Raises:
            UserError: with the run's own message.
        """
        if self.way is not Way.PLAIN or not self.failed or self.recording.updates:
            return
        if self.code == 0:
            raise UserError(
                "the script ended without a training loop: expected one that calls fit or updates "
                "of a quorate.Trainer"
            )
        if self.code == 2:
            raise UserError(f"the run on {self.label} failed: {self.why}")

    @property
    def updates(self) -> int:
        """The number of updates made by the run."""
        return max(0, len(self.recording.updates) - 1)

    @property
    def doubts(self) -> list[str]:
        """The run's own reasons why its bits may differ from another run's."""
        return [] if self.recording.end is None else self.recording.end.doubts

    def parted(self, reference: Run) -> Difference | None:
        """Return the first difference from a run that was neither resumed nor stopped."""
        last = self.first + self.updates if self.is_part and self.way is not Way.RESUMED else None
        beside = reference.recording
        if self.is_part:
            beside = beside.part(self.first, reference.updates if last is None else last)
        return first_difference(beside, self.recording)

    def summary(self) -> str:
        """Return a summary of the run, in one line."""
        if self.failed:
            return f"failed after {_count(self.updates, 'update')}: {self.why}"
        shards = self.recording.facts["shards"]
        return f"{_count(self.updates, 'update')} of {_count(shards, 'shard')}"


class BitsVerdict(NamedTuple):
    """The result of the comparison of all runs, and the lines to print."""

    is_same: bool
    lines: list[str]


def verdict(runs: Sequence[Run]) -> BitsVerdict:
    """Compare all runs with the first run that did not fail.

    Raises:
        UserError: the script fails on any number of workers, makes no update, or was changed
            between two runs.
    """
    hashed = [run for run in runs if run.way is Way.HASHED]
    runs = [run for run in runs if run.way is not Way.HASHED]
    sound = [run for run in runs if not run.failed]
    whole = [run for run in sound if not run.is_part]
    for run in runs:
        run.refuse_a_mistake()
        if not sound:
            raise UserError(f"the run on {run.label} failed: {run.why}")
        if not run.failed and run.updates == 0:
            raise UserError(f"the run on {run.label} made no update: there is nothing to compare")
    reference, *others = sound
    for run in others:
        if changed := _changed(reference, run):
            raise UserError(f"{changed} was changed between two runs: verify the script once more")
    # 1. List failures, and shards with different results in one worker: these name the cause.
    lines: list[str] = []
    for run in runs:
        if run.failed:
            after = _count(run.updates, "update")
            lines.append(f"{run.label} failed after {after}, {reference.label} did not:")
            lines.append(f"  {run.why}")
    repeated = _not_repeatable(runs)
    lines += repeated
    # 2. List differences between runs.
    compared = [(run, run.parted(reference)) for run in others if run.way is not Way.RESUMED]
    if not any(run.is_part and parting is not None for run, parting in compared):
        compared += [(run, run.parted(reference)) for run in others if run.way is Way.RESUMED]
    differing = [(run, difference) for run, difference in compared if difference is not None]
    parted = sorted(differing, key=lambda pair: pair[1].update)
    is_of_hashes = any(not run.failed and run.parted(reference) is None for run in hashed)
    if parted and is_of_hashes:
        lines.append(words.hashes((reference.label, parted[0][0].label)))
    if parted:
        run, difference = parted[0]
        where, *why = words.difference(difference, (reference.label, run.label))
        lines.append(where)
        if (call := _parting_call(reference, run, difference)) is not None:
            lines += words.operator(call)
        lines += why
        plain = [run for run, _ in differing if run.way is Way.PLAIN]
        if run.way is not Way.PLAIN and not plain and difference.update >= run.first:
            lines.append(words.shows_only(run.way.value))
        lines += [_also(run, difference) for run, difference in parted[1:]]
    # 3. List the runs' own doubts.
    doubts = _doubts(runs)
    if doubts:
        lines.append(
            "runs themselves doubt that their bits are the same elsewhere:"
            if lines
            else "digests are the same in all of these runs, and may not be in others:"
        )
        lines += [words.doubt(text, labels) for text, labels in doubts.items()]
    is_same = not lines
    if is_same:
        names = f"{', '.join(run.label for run in sound[:-1])} and {sound[-1].label}"
        shards = reference.recording.facts.get("shards")
        each = "" if shards is None else f" of {_count(shards, 'shard')}"
        made = _count(reference.updates, "update")
        lines.append(f"same bits on {names}, after each of {made}{each}")
        lines += _computed_twice(runs)
    else:
        lines[0] = words.no(lines[0])
    if not (is_same or repeated or is_of_hashes) and any(
        difference.shard is not None for run, difference in parted if run.way is Way.PLAIN
    ):
        lines.append(
            "each worker computed its first shards twice with the same result: look for what "
            "depends on the process, on the worker's number, on what was computed before, on "
            "what a first update does not do, or on what a callback or the body of a loop sets: "
            "that is the main process's alone"
        )
    notes = _notes(whole[0], whole[1:], is_same=is_same)
    return BitsVerdict(is_same, [*lines, *notes, *_idle(sound)])


def _doubts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the runs' own doubts, each with the labels of its runs."""
    doubts: dict[str, list[str]] = {}
    for run in runs:
        for text in run.doubts:
            doubts.setdefault(text, []).append(run.label)
    return doubts


def _changed(first: Run, second: Run) -> str | None:
    """Return the name of a file of the script that differs between the runs."""
    before, after = (run.recording.facts.get("sources", {}) for run in (first, second))
    return next((name for name in before if after.get(name, before[name]) != before[name]), None)


def _parting_call(first: Run, second: Run, difference: Difference) -> CallRecord | None:
    """Return the first differing operator of two runs; None if unknown.

    Both runs must have traced the shard in the first step.
    """
    if difference.update != 1 or difference.cause in (ROWS, ROW, BATCH):
        return None
    traced = [
        {(t.step, t.shard): t for t in run.recording.twice if not t.in_stages}
        for run in (first, second)
    ]
    for ticket in sorted(traced[0].keys() & traced[1].keys()):
        a, b = (by_ticket[ticket] for by_ticket in traced)
        if a.shard == difference.shard and not (a.differs or b.differs):
            return culprit(a.calls, b.calls, paired(a.results, b.results))
    return None


def _also(run: Run, difference: Difference) -> str:
    return f"{run.label}: another from update {difference.update} on"


def _not_repeatable(runs: Sequence[Run]) -> list[str]:
    """Return lines about results that differed when repeated, without duplicates."""
    texts: dict[tuple[object, ...], list[str]] = {}
    for run in runs:
        for record in run.recording.twice:
            call = None if record.call is None else (record.call.operator, record.call.line)
            what = (
                bool(record.rows),
                record.batch_differs,
                bool(record.differs),
                call,
                record.device,
                bool(record.in_stages),
            )
            if any(what[:3]):
                texts.setdefault(what, words.twice(record))
    return [line for lines in texts.values() for line in lines]


def _computed_twice(runs: Sequence[Run]) -> list[str]:
    operators: dict[str, int] = {}
    for run in runs:
        for record in run.recording.twice:
            operators[record.device] = max(operators.get(record.device, 0), record.operators)
    lines = [
        f"one shard computed twice on {device}: same bits, {_count(number, 'operator')}"
        for device, number in operators.items()
    ]
    if any(run.recording.facts.get("pipeline") is not None for run in runs):
        lines.append("each shard computed through the stages and in one piece: same bits")
    return lines


def _notes(reference: Run, others: Sequence[Run], *, is_same: bool) -> list[str]:
    lines = []
    runs = [reference, *others]
    by_run = [{(a.row, b.row): (a, b) for a, b in alike(run.recording)} for run in runs]
    common = by_run[0].keys() & set.intersection(*map(set, by_run))
    everywhere = [pair for rows, pair in by_run[0].items() if rows in common]
    lines += words.alike(everywhere, "on every number of workers")
    for run, pairs in zip(runs, by_run, strict=True):
        here = [pair for rows, pair in pairs.items() if rows not in common]
        lines += words.alike(here, f"on {run.label}, and not on all")
    changed = {run.label: changed_rows(reference.recording, run.recording) for run in others}
    return lines + [
        f"note: row {rows[0]} of the dataset has other content on {label} than on "
        f"{reference.label}, which has made no difference to parameters or loss"
        for label, rows in changed.items()
        if rows and is_same
    ]


def _idle(runs: Sequence[Run]) -> list[str]:
    """Return lines about workers without a known part: such workers computed nothing."""
    lines = []
    for run in runs:
        busy = {
            worker for update in run.recording.updates for worker in update.computed_by.values()
        }
        idle = sorted(set(range(min(run.workers, run.recording.facts["shards"]))) - busy)
        if idle:
            which = ", ".join(map(str, idle))
            lines.append(f"note: on {run.label}, worker {which} computed no shard that counted")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
