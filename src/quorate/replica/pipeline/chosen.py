"""The cut that all replicas of a run have: as named, or by what parts cost; and what is said of it.

It is made once, before there are workers, of the model and one shard. Bits do not depend on it, so
checkpoints do not have it: a run that goes on is cut anew, for the machine that it is then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from quorate.replica.pipeline.balance import balanced
from quorate.replica.pipeline.called import Call
from quorate.replica.pipeline.cut import cut, listed
from quorate.replica.pipeline.measure import Cost, measured
from quorate.replica.pipeline.split import Split
from quorate.replica.turns import Turns

REPEATS = 3  # of a cut that is made: its figures are shown, and decide nothing

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Chosen(NamedTuple):
    """A cut, and what it costs."""

    names: tuple[str, ...]  # (S - 1,) modules before which the model is cut
    costs: tuple[Cost, ...]  # (S,) of one shard


def chosen(model: nn.Module, split: Split, call: Call) -> Chosen:
    """Cut a model, and measure the stages on one shard. The model is then as it was. Blocks.

    It takes some times what the shard takes by itself.

    Args:
        model: in training mode.
        split: with names, or without: then it is cut so that stages take the same time.
        call: of the model, by the loss function.

    Raises:
        CutError: it cannot be cut so, or not into as many stages.
    """
    names = split.names

    def in_turn() -> Chosen:
        given = call.args, call.kwargs
        at = balanced(model, split.stages, *given) if names is None else names
        graphs = cut(model, at, *given)
        return Chosen(at, measured(model, graphs, *given, repeats=REPEATS))

    # Threads that load rows draw from generators, which the cut looks at.
    with call.surroundings():
        return Turns().run(lambda _: in_turn())


def described(made: Chosen) -> str:
    """Return what is said of a cut: where it is, how stages balance, and what they hand on."""
    total_s = sum(cost.seconds for cost in made.costs) or 1.0
    shares = _joined([f"{cost.seconds / total_s:.0%}" for cost in made.costs])
    sizes = _joined([size(cost.parameter_bytes) for cost in made.costs])
    handed = _joined([size(cost.given_bytes) for cost in made.costs[:-1]])
    return (
        f"stages: the model is cut before {listed(made.names)}: {shares} of a shard's time, "
        f"{sizes} of parameters; {handed} of activations per shard between stages"
    )


def size(nbytes: float) -> str:
    """Return a number of bytes in words: ``1.5 MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes / KIB:,.1f} KiB"


def _joined(parts: Sequence[str]) -> str:
    return " + ".join(parts)
