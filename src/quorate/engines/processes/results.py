"""Results of worker processes: a worker's message about a shard, and a slot of the arena."""

from __future__ import annotations

from dataclasses import dataclass

from quorate.engines.processes.arena import Arena
from quorate.engines.processes.worker_messages import ShardResult
from quorate.errors import WorkerError
from quorate.replica.shard_sum import ShardSum
from quorate.replica.totals import unpacked_totals


@dataclass
class SlotSum(ShardSum):
    """A shard's result, or a sum of results, whose vectors lie in a slot of the arena."""

    slot: int | None = None


def result_of(
    arena: Arena, worker: int, step: int, shard: int, sent: ShardResult, number: int | None
) -> SlotSum:
    """Return the result of a shard.

    Args:
        sent: by the worker.
        number: of the slot; None: the shard has no vectors.

    Raises:
        WorkerError: the message names rows that the gradient cannot have.
    """
    slot = None if number is None else arena.slot(number)
    gradient = None if slot is None else slot.flat
    if gradient is not None and arena.parameters.layout.by_rows:
        gradient.rows = sent.rows
        for name, rows in gradient.rows.items():
            parameter = arena.parameters.views.get(name)
            if (
                fault := "nobody has it" if parameter is None else rows.fault(parameter)
            ) is not None:
                raise WorkerError(
                    f"worker {worker} said of step {step}, shard {shard}, gradient of {name!r}: "
                    f"{fault}; this is a damaged message: please report it"
                )
    has_integers = slot is not None and slot.integer_buffers.numel()
    result = SlotSum(
        weight=sent.weight,
        metrics=sent.metrics,
        gradient=gradient,
        buffers=slot.floats if slot is not None and slot.floats.numel() else None,
        integer_buffers=slot.integer_buffers if slot is not None and has_integers else None,
        missing=None if sent.missing is None else frozenset(sent.missing),
        written=None if slot is None else slot.written,
        represented=sent.represented,
        totals=unpacked_totals(sent.totals),
        slot=number,
    )
    result.computed_by(worker, shard)
    return result
