"""Results of worker processes: what was lent to a worker, and what it has said of a shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from quorate.coordination.tree import Node, TreeSum, leaves
from quorate.engines.messages import Message
from quorate.engines.processes.arena import Arena
from quorate.engines.servers import Held
from quorate.errors import WorkerError
from quorate.replica.outputs.parcel import unpacked
from quorate.replica.outputs.rows import Piece
from quorate.replica.shard_sum import ShardSum
from quorate.replica.sparse.rows import Rows
from quorate.replica.totals import unpacked_totals
from quorate.replica.whole_batch.represented import Represented


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
    within: Summed | None = None  # of a shard whose gradient is in a sum with others


class Summed:
    """Shards of a run whose gradients came as one sum, with the first of them: it counts or not.

    It counts unless others were first with all of its shards. What others brought of some of them
    is left out then: it is the same to the bit, and a sum cannot be taken apart.

    Args:
        node: whose shards they are.
        of: V, the shards of the step.
    """

    def __init__(self, node: Node, of: int) -> None:
        self.shards = leaves(node, of)
        self._of = of
        self._held: list[tuple[int, Result]] = []
        self._counts = False

    def part(self, shard: int, result: Result) -> Result:
        """Return what there is of one shard: the gradient is the first one's."""
        if shard != self.shards.start:
            result.sum.gradient = None
        return result._replace(within=self)

    def decide(
        self, shard: int, result: Result, *, is_kept: bool
    ) -> tuple[list[tuple[int, Result]], bool]:
        """Note whether a shard is to be kept; with the last, return all, and whether they are."""
        self._held.append((shard, result))
        self._counts = self._counts or is_kept
        return (self._held if len(self._held) == len(self.shards) else [], self._counts)

    def taken_out(
        self, kept: deque[tuple[Node, Result]], tree: TreeSum[Result]
    ) -> Iterator[Result]:
        """Take out of the sum of a step what others brought of the shards, and yield it.

        Nothing of it was added to shards beyond these, as some of these were not there.

        Args:
            kept: what is not added yet.
            tree: the rest.
        """
        for node in [n for n in tree.parts if leaves(n, self._of).start in self.shards]:
            yield tree.parts.pop(node)
        for part in [part for part in kept if part[0][1] in self.shards]:
            kept.remove(part)
            yield part[1]


def summed(message: Message, of: int) -> dict[int, Summed]:
    """Return, by shard, which of a run came as sums, as a worker says.

    Args:
        of: V.
    """
    sums = [Summed((level, index), of) for level, index in message.get("sums", ())]
    return {shard: each for each in sums for shard in each.shards}


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
            represented=[Represented(*each) for each in message.get("represented", ())],
            totals=unpacked_totals(message["totals"]),
            outputs=outputs,
        ).computed_by(worker, shard),
        number,
    )
