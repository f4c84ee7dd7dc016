"""Resuming: a run directory holds one run, and only the same run may go on in the directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quorate.coordination.epochs import Course
from quorate.coordination.run_event import NOTE, RESUME, RunEvent
from quorate.errors import MisfitError
from quorate.machine.text import printable
from quorate.replica.kernels import TORCH
from quorate.services.checkpoints import files
from quorate.services.checkpoints.files import ValidCheckpoint
from quorate.services.run_directory.contents import require_usable, set_aside
from quorate.settings import AtResume
from quorate.training.config import OPTIONS
from quorate.training.saved_state import ParsedCheckpoint, load, loadable
from quorate.training.state import State

# Facts compared beside settings: they follow from the data and the machine.
REFUSED = ("rows", "shuffle", "order_sha256", "round")
# Values for checkpoints older than these settings.
BEFORE: Mapping[str, Any] = {"is_ordered": False, "last": "short", "sampling": None}
SAID = ("torch", "device_types", "processors", "schedule")
OF_PHASES = ("schedule", "clip_norm", "ema_decay")  # compared and reported, per phase


def begin(run_dir: Path, say: Callable[[str], None], *, fresh: bool) -> None:
    """Check that a run can be trained in a directory, which exists and is locked.

    Args:
        fresh: whether to move files of an earlier run aside first.

    Raises:
        SettingError: the directory cannot be used.
    """
    if fresh and (folder := set_aside(run_dir)) is not None:
        say(RunEvent(f"moved the earlier run in {run_dir} to {folder}", NOTE))
    require_usable(run_dir, say)
    files.clear_up(run_dir)


def restore(
    run_dir: Path,
    state: State,
    facts: dict[str, Any],
    steps_per_epoch: int,
    say: Callable[[str], None],
    doubt: Callable[[str], None],
) -> ValidCheckpoint | None:
    """Bring a state to the newest sound checkpoint, and return the checkpoint; None if none.

    Args:
        facts: facts about the resumed run, as in its checkpoints.
        doubt: receives each difference that may change the bits from here on.

    Raises:
        CheckpointError: every checkpoint is damaged, or of another run. The state is unchanged.
    """
    newest = go_to_newest(run_dir, state, facts, say)
    if newest is None:
        return None
    resumed = f"resumed {position(state.global_step, steps_per_epoch)} from {newest.path}"
    say(RunEvent(resumed, RESUME))
    for difference in differences(newest.record, facts):
        doubt(f"{difference} since step {state.global_step:,}")
    return newest


def go_to_newest(
    run_dir: Path, state: State, facts: dict[str, Any], say: Callable[[str], None]
) -> ValidCheckpoint | None:
    """Bring a state to the newest sound checkpoint, and report skipped ones; see ``restore``.

    Args:
        facts: facts about the run; facts not known yet are left out.
    """
    fitting: list[ParsedCheckpoint] = []

    def fits(path: Path, record: dict[str, Any]) -> None:
        require_same_run(path, record, facts)
        fitting.append(loadable(path, record, state))

    newest = files.find(run_dir, fits)
    if newest is None:
        return None
    for wrong in newest.passed_over:
        say(f"skipped a checkpoint: {wrong}")
    load(fitting[0], state)
    for line in fitting[0].lines:
        say(line)
    return newest


def require_same_run(path: Path, record: dict[str, Any], facts: dict[str, Any]) -> None:
    """Compare the record of a sound checkpoint with the present run.

    Args:
        facts: facts about the run; facts not known yet are left out.

    Raises:
        MisfitError: the checkpoint is of another run.
    """
    of_rows = () if _is_of_later_fit(record, facts) else REFUSED
    for name in (*_recorded(AtResume.REFUSED), *of_rows):
        was = record.get(name, BEFORE.get(name))
        if name in facts and was != facts[name]:
            raise MisfitError(
                path,
                f"it was trained with {name}={was!r}, and this run has {facts[name]!r}",
                fix="use the same, choose another run_dir, or --fresh",
            )


def _is_of_later_fit(record: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint was saved in a later fit than the fit of ``facts``.

    Updates are counted over all fits, so the checkpoint of a later fit has more updates than the
    last step of an earlier fit. Such a checkpoint has no facts about the rows of the earlier fit.
    """
    last = facts.get("last_step")
    return last is not None and bool(record["global_step"] > last)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between a run and its checkpoint, in words.

    Facts missing from older checkpoints are not compared.
    """
    found = [
        f"{name} was {printable(was[name])} and is {now[name]}"
        for name in (*_recorded(AtResume.SAID), *SAID)
        if name in was and was[name] != now.get(name, was[name])
    ]
    before, rows = was.get("row_sample") or {}, now["row_sample"] or {}
    if is_later := _is_of_later_fit(was, now):
        rows = {}
    other = [row for row, hashed in rows.items() if None not in (hashed, before.get(row))]
    other = [row for row in other if rows[row] != before[row]]
    if other:
        found.append(
            f"the dataset has different values in {len(other)} of {len(rows)} compared rows, first "
            f"in row {other[0]},"
        )
    asked = was.get("progress") or now.get("progress")
    if asked and not is_later and "last_step" in was and was["last_step"] != now["last_step"]:
        found.append(
            f"at.progress counted to {was['last_step']:,} updates and counts to "
            f"{now['last_step']:,}"
        )
    return [*found, *_other_updates(was, now, "")]


def _other_updates(was: Mapping[str, Any], now: Mapping[str, Any], of: str) -> list[str]:
    """Return the changes of how updates are made, in words: of optimizers, and of each phase.

    Args:
        of: the phase or optimizer of the values, as a suffix of messages.
    """
    found = _other_values(was, now, of)
    for kind in ("phases", "optimizers"):
        pairs = zip(was.get(kind) or (), now.get(kind) or (), strict=False)
        for number, (before_it, each) in enumerate(pairs):
            own = f" of phase {each['name']}" if kind == "phases" else f" of optimizer {number}{of}"
            found += [
                f"{name}{own} was {printable(before_it.get(name))} and is {each[name]}"
                for name in OF_PHASES
                if name in each and before_it.get(name) != each[name]
            ]
            found += _other_updates(before_it, each, own)
    return found


def _other_values(was: Mapping[str, Any], now: Mapping[str, Any], of: str) -> list[str]:
    """Return the changed values of a schedule and of parameter groups, in words.

    Args:
        of: the phase or optimizer of the values, as a suffix of messages.
    """
    found = []
    for number, (old, new) in enumerate(
        zip(was.get("hyperparameters", []), now.get("hyperparameters", []), strict=False)
    ):
        found += [
            f"{printable(name)} of {_group(number)}{of} was {printable(old.get(name))} and is "
            f"{new.get(name)} in the script"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
    return found


def kernels_of(newest: ValidCheckpoint | None) -> str | None:
    """Return the kernels of matrix products in a checkpoint's run; None without a checkpoint."""
    if newest is None:
        return None
    return str(newest.record.get("kernels", TORCH))  # missing from older checkpoints


def course_of(record: Mapping[str, Any]) -> Course:
    """Return the position in its run at which a checkpoint was written."""
    return Course(record.get("last_step", 0), (record["global_step"], record["epoch"]))


def doubts_of(record: Mapping[str, Any]) -> list[str]:
    """Return the doubts recorded in a checkpoint, as printable text."""
    return [printable(doubt, 4096) for doubt in record.get("doubts", [])]


def _group(number: int) -> str:
    return "the schedule" if number == 0 else f"parameter group {number - 1}"


def _recorded(at_resume: AtResume) -> list[str]:
    return [option.recorded for option in OPTIONS.values() if option.at_resume is at_resume]


def position(global_step: int, steps_per_epoch: int) -> str:
    """Return the position as text: ``step 12,300 (epoch 3, 41%)``."""
    epoch, done = divmod(global_step, steps_per_epoch)
    return f"step {global_step:,} (epoch {epoch + 1}, {done / steps_per_epoch:.0%})"
