"""The findings of a witness, in words."""

from __future__ import annotations

from quorate.replica.witness import calls
from quorate.replica.witness.calls import CallRecord


def call(
    blamed: CallRecord,
    both: str = "{}, then {}",
    origins: str = "the clock, a generator of the script, or state kept between shards",
) -> list[str]:
    """Return lines about the operator to blame: the reason, the module, the line.

    Args:
        both: format for two values.
        origins: possible origins of a value not made by any operator.
    """
    first, second = blamed.values
    match blamed.why:
        case calls.NUMBER:
            reason = (
                f"{blamed.operator} received {both.format(first, second)}, which no operator "
                f"computed (possible sources: {origins})"
            )
        case calls.TENSOR:
            reason = (
                f"{blamed.operator} received a different tensor, which no operator computed "
                f"({_plain(first)}): from outside torch, or kept from an earlier shard"
            )
        case calls.OPERATOR:
            reason = "different operators were called: " + both.format(
                blamed.operator, blamed.other
            )
        case calls.MEMORY:
            reason = f"{blamed.operator} returned uninitialised memory, and the memory was read"
        case _ if blamed.own_generator:
            reason = (
                f"{blamed.operator} drew from a generator that the script made; each draw changes "
                "the generator"
            )
        case _ if blamed.is_random:
            reason = (
                f"{blamed.operator} drew different numbers: the script seeds torch's generator "
                "with a different number each time (torch.manual_seed, torch.seed)"
            )
        case _:
            reason = f"{blamed.operator} returned different results for the same inputs"
    where = (
        module_text(blamed.module, blamed.kind) if blamed.kind else "outside the model's modules"
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
