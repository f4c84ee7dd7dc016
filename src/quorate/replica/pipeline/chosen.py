"""The cut for all replicas of a run, named by the user or chosen by costs; and a message about it.

The cut is made once, before there are workers, from the model and a shard. The bits do not depend
on the cut, so checkpoints do not store the cut: a resumed run is cut anew, for the present machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from quorate.replica.pipeline.balance import balanced
from quorate.replica.pipeline.called import ModelCall
from quorate.replica.pipeline.cut import cut, listed
from quorate.replica.pipeline.measure import Cost, measured
from quorate.replica.pipeline.split import Split
from quorate.replica.turns import Turns

REPEATS = 3  # measurements of a finished cut, shown only

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class MeasuredCut(NamedTuple):
    """A cut with its costs."""

    names: tuple[str, ...]  # (S - 1,) modules before which the model is cut
    costs: tuple[Cost, ...]  # (S,) of one shard


def chosen(model: nn.Module, split: Split, call: ModelCall) -> MeasuredCut:
    """Cut a model, and measure the stages on one shard. The model is restored. Blocks.

    Takes several times the duration of the shard.

    Args:
        model: the model in training mode.
        split: the split; without names, the stages are balanced by time.
        call: the call of the model by the loss function.

    Raises:
        CutError: the model cannot be cut at these names, or into this number of stages.
    """
    names = split.names

    def in_turn() -> MeasuredCut:
        given = call.args, call.kwargs
        at = balanced(model, split.stages, *given) if names is None else names
        graphs = cut(model, at, *given)
        return MeasuredCut(at, measured(model, graphs, *given, repeats=REPEATS))

    # In a turn, because the cut compares generators: threads that load rows draw from them.
    with call.surroundings():
        return Turns().run(lambda _: in_turn())


def described(made: MeasuredCut) -> str:
    """Return the message about a cut: its modules, the balance of stages, and their activations."""
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
