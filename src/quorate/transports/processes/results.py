"""Results of worker processes: what was lent to a worker, and what it has said of a shard."""

from __future__ import annotations

from typing import NamedTuple

from quorate.errors import WorkerError
from quorate.replica import totals
from quorate.replica.outputs.parcel import unpacked
from quorate.replica.outputs.rows import Piece
from quorate.replica.shard_sum import ShardSum
from quorate.transports.held import Held
from quorate.transports.processes.arena import Arena
from quorate.transports.processes.wire import Message


class Running(NamedTuple):
    """What a worker was given and has not answered."""

    ticket: int
    step: int
    shard: int
    slot: int | None
    more: tuple[int | None, ...] = ()  # slots of the shards after it, of a run


class Result(NamedTuple):
    """One or more shards' sums, and the slot that they lie in."""

    sum: ShardSum
    slot: int | None


def result_of(
    arena: Arena, ticket: tuple[int, int, int], message: Message, number: int | None
) -> Result:
    """Return what a worker said of a shard, with the slot of this number if it has one.

    Args:
        ticket: worker, step and shard.

    Raises:
        WorkerError: it said what cannot be a row of a gradient.
    """
    worker, step, shard = ticket
    slot = None if number is None else arena.slot(number)
    missing = message["missing"]
    gradient = None if slot is None else slot.flat
    if gradient is not None and arena.parameters.layout.by_rows:
        gradient.rows = message.get("rows", {})
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
        gradient = Held(step, message["ticket"])
    outputs = list[Piece]()
    if "outputs" in message:
        value = unpacked(message["outputs"], message.get("memory"))
        outputs = [Piece(step, shard, value)]
    has_integers = slot is not None and slot.integer_buffers.numel()
    return Result(
        ShardSum(
            weight=message["weight"],
            metrics=message["metrics"],
            gradient=gradient,
            buffers=slot.floats if slot is not None and slot.floats.numel() else None,
            integer_buffers=slot.integer_buffers if slot is not None and has_integers else None,
            missing=None if missing is None else frozenset(missing),
            written=None if slot is None else slot.written,
            represented=message.get("represented", []),
            totals=totals.from_json(message["totals"]),
            outputs=outputs,
        ).computed_by(worker, shard),
        number,
    )
