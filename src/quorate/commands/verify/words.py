"""Findings of a verification, in words."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.commands.verify import calls, differences
from quorate.commands.verify.differences import Difference, Sighting
from quorate.commands.verify.records import CallRecord, TwiceRecord


def difference(found: Difference, labels: tuple[str, str]) -> list[str]:
    """Where two runs part, and why: lines.

    Args:
        labels: of the runs: "1 worker", "2 workers".
    """
    if found.cause == differences.WEIGHTS:
        return [
            f"the model is not made the same on {labels[0]} and {labels[1]}: before the first "
            f"update there are other values in {_parameters(found)}; seed what makes it, or pass "
            "the function that makes the model and not the model"
        ]
    if found.rates is not None:
        one, other = found.rates
        return [
            f"{labels[0]} and {labels[1]} part after update {found.update}:",
            f"  parameters are the same; the learning rate of the next update is {one!r} on the "
            f"one, {other!r} on the other: look at the schedule, or at how the optimizer is made",
        ]
    where = f"update {found.update}"
    if found.shard is not None and found.workers is not None:
        first, second = found.workers
        where += f", shard {found.shard} (by worker {first} of the one, {second} of the other)"
    lines = [f"{labels[0]} and {labels[1]} part in {where}:", f"  {_cause(found)}"]
    if found.cause != differences.UPDATE and found.parameter is not None:
        lines.append(f"  after that, gradients differ: {_parameters(found)}")
    if found.shards > 1:
        lines.append(f"  {found.shards} shards of this update differ")
    return lines


def _cause(found: Difference) -> str:
    module = _module(found.module, found.kind)
    after = "" if found.after is None else f"; the last that was the same is {_quoted(found.after)}"
    match found.cause:
        case differences.ROWS:
            return "it consists of other rows: the function `order` is not a pure one"
        case differences.ROW:
            return f"row {found.row} of the dataset has other content{_seen(found)}"
        case differences.BATCH:
            return "its rows have the same content, the batch made of them not: collate or augment"
        case differences.MODULE:
            return f"{module} was given the same, and returned something else{after}"
        case differences.BETWEEN:
            between = (
                "before any module returned"
                if found.after is None
                else (f"after {_quoted(found.after)} returned the same")
            )
            return f"{module} was given something else: it was made {between}"
        case differences.CALLS:
            return f"other modules are called: {module} in one run only{after}"
        case differences.LOSS:
            return f"all modules returned the same, the loss function did not: {found.metric!r}"
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
        case differences.LENGTH:
            return "one of them has no such update: it ended before"
    return (
        "all shards and the learning rate are the same; the optimizer made something else of "
        f"them: {_parameters(found)}"
    )


def twice(found: TwiceRecord) -> list[str]:
    """What one shard, loaded and computed twice by the same worker, has shown: lines, or none."""
    where = f"by worker {found.worker} on {found.device} (step {found.step}, shard {found.shard})"
    lines = []
    if found.rows:
        rows = ", ".join(map(str, found.rows[:8])) + (", ..." if len(found.rows) > 8 else "")
        many = "s" if len(found.rows) > 1 else ""
        lines += [
            f"rows are not repeatable: loaded twice {where}:",
            f"  row{many} {rows} of the dataset had other content the second time: it draws from a "
            "generator of its own, reads the clock, counts how often it is asked, or changes what "
            "it holds",
        ]
    if found.batch_differs:
        lines += [
            f"batches are not repeatable: made twice {where}, from rows with the same content:",
            "  collate or augment made another batch the second time: it draws from a generator of "
            "its own, reads the clock, or counts its calls",
        ]
    if found.differs:
        lines.append(f"computing is not repeatable: done twice {where}, from the same rows:")
        if found.call is None:
            lines.append(f"  {found.differs[0]} differs, and no operator can be named")
        else:
            lines += [f"  {line}" for line in call(found.call)]
    return lines


def operator(found: CallRecord) -> list[str]:
    """Which operator two runs part at: lines."""
    first, *rest = call(
        found,
        "{} on the one, {} on the other",
        "the process's number or its memory, the hash of a string or the order of a set "
        "(PYTHONHASHSEED), the environment, or a state of the script's own",
    )
    return [f"  the operator that they part at: {first}", *(f"    {line}" for line in rest)]


def call(
    found: CallRecord,
    both: str = "{}, then {}",
    origins: str = "the clock, or a generator or a state of the script's own",
) -> list[str]:
    """Which operator, why, in which module, on which line.

    Args:
        both: how two values are told.
        origins: where a value may come from that no operator made.
    """
    first, second = found.values
    match found.why:
        case calls.NUMBER:
            said = (
                f"{found.operator} was given {both.format(first, second)}, which no operator made: "
                f"{origins}"
            )
        case calls.TENSOR:
            said = (
                f"{found.operator} was given another tensor, which no operator made "
                f"({_plain(first)}): it came from outside of torch, or was kept from before"
            )
        case calls.OPERATOR:
            said = "another operator was called: " + both.format(found.operator, found.other)
        case calls.MEMORY:
            said = f"what {found.operator} returned was read, and it is not initialised"
        case _ if found.own_generator:
            said = f"{found.operator} drew from a generator that the script made, which goes on"
        case _ if found.is_random:
            said = (
                f"{found.operator} drew other numbers: the script seeds torch's generator, with "
                "another number each time (torch.manual_seed, torch.seed)"
            )
        case _:
            said = f"{found.operator} made other results of the same inputs"
    where = _module(found.module, found.kind) if found.kind else "outside of the model's modules"
    back = "in the backward pass of " if found.in_backward else ""
    lines = [
        said,
        f"{back}{where}" if back and found.kind else f"in {where}" if found.kind else where,
    ]
    if found.line:
        lines.append(f"{found.line}: {found.source}")
    return lines


def alike(pairs: Sequence[tuple[Sighting, Sighting]], where: str) -> list[str]:
    """Rows of one epoch with the same content, if there are any: lines.

    Args:
        where: on how many workers.
    """
    if not pairs:
        return []
    (before, here), more = pairs[0], len(pairs) - 1
    rest = f", and {more} more such rows" if more else ""
    return [
        f"note: {where}, row {here.row} (worker {here.worker}) holds what row {before.row} "
        f"(worker {before.worker}) holds{rest}"
    ]


def _seen(found: Difference) -> str:
    if not found.seen:
        return ""
    one = found.seen[0]
    return (
        f": what row {one.row} has (worker {one.worker}, step {one.step}, shard {one.shard}), "
        "which is seen twice"
    )


def _parameters(found: Difference) -> str:
    more = found.parameters - 1
    return f"{found.parameter!r}" + (f" and {more} more" if more > 0 else "")


def _module(path: str | None, kind: str) -> str:
    return f"module {path!r} ({kind})" if path else f"the model ({kind})"


def _quoted(path: str) -> str:
    return f"{path!r}" if path else "the model"


def _plain(text: str) -> str:
    """Of a tensor its dtype and shape, without the hash."""
    return text.partition("]")[0] + "]"
