"""What a witness found, in words."""

from __future__ import annotations

from quorate.replica.witness import calls
from quorate.replica.witness.calls import CallRecord


def call(
    blamed: CallRecord,
    both: str = "{}, then {}",
    origins: str = "the clock, or a generator or a state of the script's own",
) -> list[str]:
    """Say which operator is to blame, why, in which module, on which line.

    Args:
        both: how two values are put into words.
        origins: where a value may come from that no operator made.
    """
    first, second = blamed.values
    match blamed.why:
        case calls.NUMBER:
            reason = (
                f"{blamed.operator} was given {both.format(first, second)}, which no operator "
                f"made: {origins}"
            )
        case calls.TENSOR:
            reason = (
                f"{blamed.operator} was given another tensor, which no operator made "
                f"({_plain(first)}): it came from outside of torch, or was kept from before"
            )
        case calls.OPERATOR:
            reason = "another operator was called: " + both.format(blamed.operator, blamed.other)
        case calls.MEMORY:
            reason = f"what {blamed.operator} returned was read, and it is not initialised"
        case _ if blamed.own_generator:
            reason = f"{blamed.operator} drew from a generator that the script made, which goes on"
        case _ if blamed.is_random:
            reason = (
                f"{blamed.operator} drew other numbers: the script seeds torch's generator, with "
                "another number each time (torch.manual_seed, torch.seed)"
            )
        case _:
            reason = f"{blamed.operator} made other results of the same inputs"
    where = (
        module_text(blamed.module, blamed.kind) if blamed.kind else "outside of the model's modules"
    )
    back = "in the backward pass of " if blamed.in_backward else ""
    lines = [
        reason,
        f"{back}{where}" if back and blamed.kind else f"in {where}" if blamed.kind else where,
    ]
    if blamed.line:
        lines.append(f"{blamed.line}: {blamed.source}")
    return lines


def module_text(path: str | None, kind: str) -> str:
    """Return ``module 'encoder.0' (Linear)``."""
    return f"module {path!r} ({kind})" if path else f"the model ({kind})"


def _plain(text: str) -> str:
    """Return the dtype and shape of a tensor's text, without the hash."""
    return text.partition("]")[0] + "]"
