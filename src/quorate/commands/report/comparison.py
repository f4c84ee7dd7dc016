"""The differences between two runs: settings, losses, digests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from quorate.commands.report.run_history import RunHistory, digest_of, is_loss


class LossDifference(NamedTuple):
    """The first update whose losses differ."""

    name: str  # name of the loss
    global_step: int
    values: tuple[float, float]


class RunComparison(NamedTuple):
    """The comparison of two runs."""

    settings: list[tuple[str, Any, Any]]  # different settings; None: a run lacks the setting
    same_settings: list[tuple[str, Any]]
    digest_step: int | None  # newest step with a sound checkpoint in both
    digests: tuple[str, str] | None  # after this step
    common_updates: int  # number of updates with compared losses
    loss: LossDifference | None  # None: all compared losses are equal
    validation: LossDifference | None  # the first evaluation whose metrics differ


def compare(first: RunHistory, second: RunHistory) -> RunComparison:
    """Compare two runs."""
    differing, same = _settings(first, second)
    step, digests = _digests(first, second)
    common, loss = _losses(first, second)
    validation = _validation(first, second)
    return RunComparison(differing, same, step, digests, common, loss, validation)


def all_settings(history: RunHistory) -> dict[str, Any]:
    """Return the settings of a run with its script and its hyperparameters."""
    settings: dict[str, Any] = {}
    if history.command:
        script, *arguments = history.command
        settings["script"] = script
        settings["arguments"] = " ".join(arguments)
    settings |= history.settings
    record = history.record
    settings["optimizer"] = record.get("optimizer") or None
    for number, group in enumerate(record.get("hyperparameters") or []):
        of = "schedule" if number == 0 else f"group {number - 1}"
        settings |= {f"{name} ({of})": value for name, value in group.items()}
    for phase in record.get("phases") or []:
        settings[f"optimizer of phase {phase['name']}"] = phase["optimizer"]
        for number, group in enumerate(phase.get("hyperparameters") or []):
            of = "schedule" if number == 0 else f"group {number - 1}"
            of = f"{of}, phase {phase['name']}"
            settings |= {f"{name} ({of})": value for name, value in group.items()}
    return {name: value for name, value in settings.items() if value is not None}


def _settings(
    first: RunHistory, second: RunHistory
) -> tuple[list[tuple[str, Any, Any]], list[tuple[str, Any]]]:
    ours, theirs = all_settings(first), all_settings(second)
    names = [*ours, *(name for name in theirs if name not in ours)]
    differing = [(n, ours.get(n), theirs.get(n)) for n in names if ours.get(n) != theirs.get(n)]
    return differing, [(n, ours[n]) for n in names if n in ours and ours[n] == theirs.get(n)]


def _digests(first: RunHistory, second: RunHistory) -> tuple[int | None, tuple[str, str] | None]:
    """Return the newest step with a sound checkpoint in both runs, and the digests of the two."""
    theirs = {each.global_step: each for each in second.checkpoints}
    for ours in first.checkpoints:
        if (other := theirs.get(ours.global_step)) is None:
            continue
        known = [
            history.digest
            if history.digest is not None and history.digest.global_step == each.global_step
            else digest_of(each)
            for history, each in ((first, ours), (second, other))
        ]
        if known[0] is not None and known[1] is not None:
            return ours.global_step, (known[0].weights, known[1].weights)
    return None, None


def _losses(first: RunHistory, second: RunHistory) -> tuple[int, LossDifference | None]:
    """Return the number of losses in both runs, and the first loss that differs in any bit."""
    common, found = 0, None
    for name in first.losses:
        if name not in second.updates.curves:
            continue
        columns = []
        for history in (first, second):
            curve = history.updates.curves[name]
            steps = np.array(history.updates.steps)[np.array(curve.rows)]
            # A repeated step counts with the later line.
            steps, places = np.unique(steps[::-1], return_index=True)
            columns.append((steps, np.array(curve.values)[::-1][places]))
        (a_steps, a), (b_steps, b) = columns
        steps, ours, theirs = np.intersect1d(a_steps, b_steps, return_indices=True)
        common += len(steps)
        a, b = a[ours], b[theirs]
        differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
        if differs.any():
            place = int(np.argmax(differs))
            one = LossDifference(name, int(steps[place]), (float(a[place]), float(b[place])))
            if found is None or one.global_step < found.global_step:
                found = one
    return common, found


def _validation(first: RunHistory, second: RunHistory) -> LossDifference | None:
    theirs = {e.global_step: e.metrics for e in second.updates.evaluations}
    for evaluation in sorted(first.updates.evaluations):
        other = theirs.get(evaluation.global_step, {})
        names = sorted(evaluation.metrics.keys() & other.keys(), key=lambda n: not is_loss(n))
        for name in names:
            a, b = evaluation.metrics[name], other[name]
            if a != b and not (a != a and b != b):
                return LossDifference(name, evaluation.global_step, (a, b))
    return None
