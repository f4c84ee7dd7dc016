"""The findings of a verification, in words."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.commands.verify import differences
from quorate.commands.verify.differences import Difference, RowSighting
from quorate.commands.verify.records import TwiceRecord
from quorate.replica.witness.calls import CallRecord
from quorate.replica.witness.words import call, module_text


def difference(parting: Difference, labels: tuple[str, str]) -> list[str]:
    """Return lines about the first difference of two runs, and its cause.

    Args:
        labels: labels of the runs: "1 worker", "2 workers".
    """
    if parting.cause == differences.WEIGHTS:
        return [
            f"the model is not made the same on {labels[0]} and {labels[1]}: before the first "
            f"update there are other values in {_parameters(parting)}; seed what makes it, or pass "
            "the function that makes the model and not the model"
        ]
    if parting.cause == differences.RESTORED:
        return [
            f"{labels[1]} does not begin with what {labels[0]} has after update {parting.update}:",
            f"  a checkpoint does not hold {_parameters(parting)} as it was, or what makes the "
            "model or a callback changes it when the script begins again",
        ]
    if parting.rates is not None:
        first, second = parting.rates
        return [
            f"{labels[0]} and {labels[1]} part after update {parting.update}:",
            f"  parameters are the same; the learning rate of the next update is {first!r} on the "
            f"one, {second!r} on the other: look at the schedule, or at how the optimizer is made",
        ]
    where = f"update {parting.update}"
    if parting.shard is not None and parting.workers is not None:
        first, second = parting.workers
        where += f", shard {parting.shard} (by worker {first} of the one, {second} of the other)"
    lines = [f"{labels[0]} and {labels[1]} part in {where}:", f"  {_cause(parting)}"]
    is_named = parting.cause in (differences.UPDATE, differences.STAGES)
    if not is_named and parting.parameter is not None:
        lines.append(f"  after that, gradients differ: {_parameters(parting)}")
    if parting.shards > 1:
        lines.append(f"  {parting.shards} shards of this update differ")
    return lines


def _cause(parting: Difference) -> str:
    module = module_text(parting.module, parting.kind)
    after = (
        "" if parting.after is None else f"; the last that was the same is {_quoted(parting.after)}"
    )
    match parting.cause:
        case differences.ROWS:
            return "it consists of other rows: the function `order` is not a pure one"
        case differences.ROW:
            return f"row {parting.row} of the dataset has other content{_seen(parting)}"
        case differences.BATCH:
            return "its rows have the same content, the batch made of them not: collate or augment"
        case differences.MODULE:
            return f"{module} was given the same, and returned something else{after}"
        case differences.BETWEEN:
            between = (
                "before any module returned"
                if parting.after is None
                else (f"after {_quoted(parting.after)} returned the same")
            )
            return f"{module} was given something else: it was made {between}"
        case differences.CALLS:
            return f"other modules are called: {module} in one run only{after}"
        case differences.LOSS:
            return f"all modules returned the same, the loss function did not: {parting.metric!r}"
        case differences.BACKWARD:
            return (
                f"forward is the same; on the way back the gradient of what {module} returned is "
                "the first that differs"
            )
        case differences.GRADIENT:
            return "forward is the same, and so are gradients of all that modules returned"
        case differences.BUFFERS:
            return (
                "the gradient is the same; the model's buffers, or parameters that its forward "
                "pass writes, are not"
            )
        case differences.STAGES:
            return (
                "in one piece all shards are the same; the stages made something else of them: "
                f"{_parameters(parting)}"
            )
        case differences.LENGTH:
            return "one of them has no such update: it ended before"
    return (
        "all shards and the learning rate are the same; the optimizer, or a callback after it, "
        f"made something else of them: {_parameters(parting)}"
    )


def twice(record: TwiceRecord) -> list[str]:
    """Return lines about a shard loaded and computed twice by one worker; empty if equal."""
    where = (
        f"by worker {record.worker} on {record.device} (step {record.step}, shard {record.shard})"
    )
    lines = []
    if record.in_stages:
        last = record.shard + record.in_stages - 1
        shards = (
            f"shard {record.shard}" if last == record.shard else f"shards {record.shard}-{last}"
        )
        return [
            "stages do not compute what one piece computes: both done by worker "
            f"{record.worker} on {record.device} (step {record.step}, {shards}):",
            f"  {record.differs[0]} through the stages: what a module or the loss computes depends "
            "on the process or the thread that computes it",
        ]
    if record.rows:
        rows = ", ".join(map(str, record.rows[:8])) + (", ..." if len(record.rows) > 8 else "")
        many = "s" if len(record.rows) > 1 else ""
        lines += [
            f"rows are not repeatable: loaded twice {where}:",
            f"  row{many} {rows} of the dataset had other content the second time: it draws from a "
            "generator of its own, reads the clock, counts how often it is asked, remembers what "
            "it gave, or changes what it holds",
        ]
    if record.batch_differs:
        lines += [
            f"batches are not repeatable: made twice {where}, from rows with the same content:",
            "  collate or augment made another batch the second time: it draws from a generator of "
            "its own, reads the clock, or counts its calls",
        ]
    if record.differs:
        lines.append(f"computing is not repeatable: done twice {where}, from the same rows:")
        if record.call is None:
            lines.append(f"  {record.differs[0]} differs, and no operator can be named")
        else:
            lines += [f"  {line}" for line in call(record.call)]
    return lines


def shows_only(way: str) -> str:
    """Return the line about the only runs with a difference, and the likely cause."""
    reasons = {
        "on towers": "workers are threads of one process there: look for a global or a switch of "
        "the process that several write, or for what copies of the model share",
        "after a resume": "look for a state that no checkpoint has: of the optimizer, the "
        "schedule, a callback, an attribute, the loss function or the dataset",
        "after a worker was killed": "look for a state that only the worker had which was killed: "
        "an attribute, a global, a parameter that its forward pass has put elsewhere",
    }
    return f"  it shows {way} only: {reasons[way]}"


def hashes(labels: tuple[str, str]) -> str:
    """Return the line about hashes as the cause: runs are equal under one hash seed only."""
    return (
        f"PYTHONHASHSEED decides: {labels[1]} and {labels[0]} are the same under one hash seed and "
        "differ under two. The script goes over a set of strings in whatever order it has, or uses "
        "hash() of a string: sort the set (sorted(...)), or take hashlib"
    )


def doubt(text: str, labels: Sequence[str]) -> str:
    """Return the line about a run's own doubt."""
    return f"  because {text} (so {_listed(labels)})"


def no(line: str) -> str:
    """Return the first line of a verdict that bits are not the same."""
    return f"same bits: no: {line}"


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def operator(blamed: CallRecord) -> list[str]:
    """Return lines about the first differing operator of two runs."""
    first, *rest = call(
        blamed,
        "{} on the one, {} on the other",
        "the process's number or its memory, the hash of a string or the order of a set "
        "(PYTHONHASHSEED), the environment, or a state of the script's own, which a callback sets "
        "in the main process alone",
    )
    return [f"  the operator that they part at: {first}", *(f"    {line}" for line in rest)]


def alike(pairs: Sequence[tuple[RowSighting, RowSighting]], where: str) -> list[str]:
    """Return lines about rows of one epoch with the same content; empty without any.

    Args:
        where: the number of workers, in words.
    """
    if not pairs:
        return []
    (before, here), more = pairs[0], len(pairs) - 1
    rest = f", and {more} more rows equal another row" if more else ""
    return [
        f"note: {where}, row {here.row} (worker {here.worker}) has the content of row {before.row} "
        f"(worker {before.worker}){rest}; look for a random generator that repeats, unless the "
        "dataset has equal rows"
    ]


def _seen(parting: Difference) -> str:
    if not parting.seen:
        return ""
    seen = parting.seen[0]
    return (
        f": what row {seen.row} has (worker {seen.worker}, step {seen.step}, shard {seen.shard}), "
        "which is seen twice"
    )


def _parameters(parting: Difference) -> str:
    more = parting.parameters - 1
    return f"{parting.parameter!r}" + (f" and {more} more" if more > 0 else "")


def _quoted(path: str) -> str:
    return f"{path!r}" if path else "the model"
