"""The conclusion of a bench: whether more workers are faster, and why not, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from quorate.commands.bench.results import Result
from quorate.commands.bench.split import PARTS, compute_s
from quorate.machine.text import three_digits

ALIKE = 0.05  # relative difference below which speeds are called equal
EFFICIENT = 0.8  # least speed-up per device that needs no reason
# Findings that explain more than the times of a shard and of an update.
BY_ITSELF = ("straggler", "compute", "evaluation")
MOSTLY = {
    "input": "waiting for rows",
    "exchange": "handing gradients over and adding them up",
    "update": "the optimizer",
    "waiting": "waiting for other workers and for messages",
    "other": "callbacks, logs, saves and the body of the loop",
}


def conclusion(results: Sequence[Result]) -> str:
    """Return one sentence, or two if the contender with the most workers is not the fastest.

    Args:
        results: in order of the number of workers.
    """
    base, *others = results
    if not others:
        step, share = base.step_s, base.split["compute"]
        return (
            f"{base.contender.label()}: a step takes {milliseconds(step)}, of which forward and "
            f"backward take {milliseconds(step * share)}; to compare, name several numbers of "
            "workers: --workers 1,2"
        )
    fastest = max(results, key=lambda result: result.speed_up)
    most = others[-1]
    said = [_compared(most if fastest is base else fastest, base)]
    if fastest not in (base, most):
        said.append(_compared(most, fastest))
    return "; ".join(said)


def milliseconds(seconds: float) -> str:
    """Return a time with three digits: ``0.62 ms``, ``1.25 s``."""
    if seconds < 1:
        return f"{three_digits(seconds * 1e3)} ms"
    return f"{three_digits(seconds)} s"


def _compared(result: Result, other: Result) -> str:
    ratio = result.speed_up / other.speed_up
    are = "are" if result.contender.workers > 1 else "is"
    one = result.contender.label()
    if ratio > 1 + ALIKE:
        how = f"{are} {three_digits(ratio)} times as fast as {other.contender.label()} here"
    elif ratio < 1 - ALIKE:
        how = (
            f"{are} slower than {other.contender.label()} here "
            f"({three_digits(ratio)} times the speed)"
        )
    else:
        how = (
            f"{are} about as fast as {other.contender.label()} here "
            f"({three_digits(ratio)} times the speed)"
        )
    is_good = ratio > 1 + ALIKE and result.efficiency >= EFFICIENT
    return f"{one} {how}" if is_good else f"{one} {how}: {_reason(result)}"


def _reason(result: Result) -> str:
    """Return why a contender is not faster."""
    finding = result.findings[0]
    name, _, words = finding.words.partition(": ")
    what = words.replace("it takes", f"{name} takes", 1)
    if finding.name in BY_ITSELF and len(result.findings) == 1:
        return what
    shard = milliseconds(median(map(compute_s, result.runs)))
    beside = milliseconds(result.step_s * (1 - result.split["compute"]))
    part = max((part for part in PARTS if part != "compute"), key=lambda part: result.split[part])
    first = f"{what}; " if finding.name in BY_ITSELF else ""
    return (
        f"{first}a shard takes {shard}, and an update costs {beside} beside the shards, mostly "
        f"{MOSTLY[part]}"
    )
