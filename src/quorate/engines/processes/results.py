"""Results of worker processes: a worker's message about a shard, and a slot of the arena."""

from __future__ import annotations

from dataclasses import dataclass

from quorate.engines.messages import Message
from quorate.engines.processes.arena import Arena
from quorate.engines.servers import RemoteGradient
from quorate.errors import WorkerError
from quorate.replica.outputs.parcel import unpacked
from quorate.replica.outputs.rows import Piece
from quorate.replica.shard_sum import ShardSum
from quorate.replica.sparse.rows import Rows
from quorate.replica.totals import unpacked_totals
from quorate.replica.whole_batch.represented import Represented


@dataclass
class SlotSum(ShardSum):
    """A shard's result, or a sum of results, whose vectors lie in a slot of the arena."""

    slot: int | None = None


def result_of(
    arena: Arena, worker: int, step: int, shard: int, message: Message, number: int | None
) -> SlotSum:
    """Return the result of a shard.

    Args:
        message: the worker's message about the shard.
        number: of the slot; None: the shard has no vectors.

    Raises:
        WorkerError: the message names rows that the gradient cannot have.
    """
    slot = None if number is None else arena.slot(number)
    missing = message["missing"]
    gradient = None if slot is None else slot.flat
    if gradient is not None and arena.parameters.layout.by_rows:
        gradient.rows = {name: Rows(*pair) for name, pair in message.get("rows", {}).items()}
        for name, rows in gradient.rows.items():
            parameter = arena.parameters.views.get(name)
            if (
                fault := "nobody has it" if parameter is None else rows.fault(parameter)
            ) is not None:
                raise WorkerError(
                    f"worker {worker} said of step {step}, shard {shard}, gradient of {name!r}: "
                    f"{fault}; this is a damaged message: please report it"
                )
    if message.get("is_held"):
        gradient = RemoteGradient(step, message["ticket"])
    outputs = list[Piece]()
    if "outputs" in message:
        value = unpacked(message["outputs"], message.get("memory"))
        outputs = [Piece(step, shard, value)]
    has_integers = slot is not None and slot.integer_buffers.numel()
    result = SlotSum(
        weight=message["weight"],
        metrics=message["metrics"],
        gradient=gradient,
        buffers=slot.floats if slot is not None and slot.floats.numel() else None,
        integer_buffers=slot.integer_buffers if slot is not None and has_integers else None,
        missing=None if missing is None else frozenset(missing),
        written=None if slot is None else slot.written,
        represented=[Represented(*each) for each in message.get("represented", ())],
        totals=unpacked_totals(message["totals"]),
        outputs=outputs,
        slot=number,
    )
    result.computed_by(worker, shard)
    return result
