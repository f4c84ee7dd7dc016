"""A slice on a server: sums of gradients, and updates of its parameters. Independent of transports.

The pieces of parameters are laid out as in the whole vectors: so the slice is updated in the same
stretches as whole vectors, and is cut in the same way where parameters have no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from quorate.coordination.tree import TreeSum, tree_sum
from quorate.engines.partition import Partition
from quorate.engines.servers import (
    NO_IMAGE,
    Answer,
    Image,
    SliceHandler,
    as_image,
    read_image,
)
from quorate.replica.flat import Flat, Layout
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.cores import cores_for, intra_op_threads
from quorate.training.optimizing.known_optimizers import ELEMENTWISE
from quorate.training.optimizing.mean import Addition, make_mean
from quorate.training.optimizing.not_finite import not_finite
from quorate.training.owners.slice_state import SliceState

CPU = torch.device("cpu")


class ServerSlice(SliceHandler):
    """The state of a server, and its answers to requests. The first request is ``make``."""

    def __init__(self) -> None:
        self._shards: dict[int, Flat] = {}  # by ticket: gradients without a decision
        self._dropped: set[int] = set()  # tickets of dropped gradients that have not arrived
        self._sums: dict[int, TreeSum[Flat]] = {}  # by step, sums of accepted shards
        self._spare: list[Flat] = []  # memory for gradients
        self._mean: Flat | None = None  # of the newest step

    def take(self, ticket: int, image: Image) -> None:
        """Store a shard's gradient until the decision, unless the gradient is dropped already."""
        if ticket in self._dropped:
            self._dropped.remove(ticket)
            return
        # A copy: engines pass gradients in shared memory, which is scarce.
        gradient = self._spare.pop() if self._spare else self._parameters.layout.new(CPU)
        read_image(image, gradient.vectors)
        self._shards[ticket] = gradient

    @torch.no_grad()
    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Add a shard to the sum of its step, as far as the order of the tree allows."""
        if step not in self._sums:
            self._sums[step] = TreeSum(leaves, self._sum)
        with intra_op_threads(self._threads):
            self._sums[step].put((0, shard), self._shards.pop(ticket))

    def drop(self, ticket: int) -> None:
        """Reuse the memory of a gradient that is not needed, now or when the gradient arrives."""
        if ticket in self._shards:
            self._spare.append(self._shards.pop(ticket))
        else:
            self._dropped.add(ticket)

    @torch.no_grad()
    def do(self, told: Mapping[str, Any], image: Image) -> Answer:
        """Answer a request of the coordinator."""
        match told["kind"]:
            case "make":
                self._make(told, image)
                return {}, as_image(self._parameters.vectors)
            case "set":
                read_image(image, self._parameters.vectors)
                return {}, as_image(self._parameters.vectors)
            case "add":
                return self._add(told), NO_IMAGE
            case "step":
                self._step(told)
                return {}, as_image(self._parameters.vectors)
            case "average":
                assert self._average is not None
                self._average.update(told["n"])
                return {}, NO_IMAGE
            case "averaged":
                assert self._average is not None
                return {}, as_image(self._average.shadow.vectors)
            case "get rest":
                return {}, as_image(self._optimizer.next_rest())
            case "put rest":
                read_image(image, self._optimizer.next_rest())
                return {}, NO_IMAGE
            case kind:
                return self._optimizer.answer(kind, told), NO_IMAGE

    # --- state ------------------------------------------------------------------------------------

    def _make(self, made: Mapping[str, Any], image: Image) -> None:
        """Receive a slice of parameters and averages, and make the optimizer; its state is zero."""
        number, count = made["server"]
        partition = Partition.among(Layout.of(made["layout"]), count)
        self._pieces, layout = partition.pieces(number), partition.layout(number)
        elements = sum(partition.whole.sizes)
        # As many as a coordinator without servers uses; the bits do not depend on the number.
        self._threads = cores_for(elements)
        self._spare, self._mean = [], None
        self._parameters, self._average = layout.new(CPU), None
        image = read_image(image, self._parameters.vectors)
        if made["ema_decay"] is not None:
            self._average = Average(made["ema_decay"], self._parameters)
            read_image(image, self._average.shadow.vectors)
        kind = {known.__name__: known for known in ELEMENTWISE}[made["optimizer"]]
        self._optimizer = SliceState(
            *(kind, made["groups"], partition, number, f"server {number}"),
            self._parameters,
            elements,
        )
        self._optimizer.put_zeros(made["state"])

    # --- an update --------------------------------------------------------------------------------

    def _add(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Finish and divide the sum of a step; return whether all is finite, and squared norms."""
        tree, additions = self._sums.pop(told["step"]), list[Addition]()

        def join(left: Flat, right: Flat) -> Flat:
            additions.append((left, right))
            return left

        total = tree_sum([*tree.parts.items()], tree.leaves, join, told["shards"])
        with intra_op_threads(1):
            found = make_mean(
                total,
                additions,
                told["weight"],
                checks=True,
                wants_squares=told["wants_norm"],
                cores=self._threads,
            )
        self._spare += [right for _, right in additions]
        odd = [] if found.is_finite else [self._pieces[int(n)].name for n in not_finite(total)]
        if self._mean is not None:
            self._spare.append(self._mean)
        self._mean = total
        squares = [*chain.from_iterable(found.squares)] if found.is_finite else []
        return {"is_finite": found.is_finite, "odd": odd, "squares": squares}

    def _sum(self, left: Flat, right: Flat) -> Flat:
        """Return left + right, in the memory of the left operand."""
        left.add_(right)
        self._spare.append(right)
        return left

    def _step(self, told: Mapping[str, Any]) -> None:
        """Make the update from the newest mean."""
        mean = self._mean
        assert mean is not None
        with intra_op_threads(self._threads):
            if told["factor"] != 1.0:
                mean.mul_(told["factor"])
            self._optimizer.update(mean, told["missing"], told["groups"])
