"""A slice on a server: sums of gradients, and updates of its parameters. Independent of transports.

The pieces of parameters are laid out as in the whole vectors, with an optimizer of the user's kind
over them: so the slice is updated in the same stretches as whole vectors, and is cut in the same
way where parameters have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.coordination.tree import TreeSum, tree_sum
from quorate.engines.servers import NO_IMAGE, Answer, Image, SliceHandler, as_bytes
from quorate.replica.flat import Flat, Layout
from quorate.replica.model import bind
from quorate.training.optimizing.cores import cores_for, intra_op_threads
from quorate.training.optimizing.known_optimizers import ELEMENTWISE
from quorate.training.optimizing.mean import Addition, make_mean
from quorate.training.optimizing.not_finite import not_finite
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.update import Average
from quorate.training.serving.pieces import (
    Entry,
    Piece,
    from_json,
    is_by_element,
    taken,
    told,
)

CPU = torch.device("cpu")


class Slice(SliceHandler):
    """The state of a server, and its answers to requests. The first request is ``make``."""

    def __init__(self) -> None:
        self._shards: dict[int, tuple[int, Flat]] = {}  # by ticket: step, gradient
        self._sums: dict[int, TreeSum[Flat]] = {}  # by step, sums of accepted shards
        self._closed = -1  # steps up to this one are closed
        self._spare: list[Flat] = []  # memory for gradients
        self._mean: Flat | None = None  # of the newest step

    def take(self, ticket: int, step: int, image: Image) -> None:
        """Store a shard's gradient, unless its step is closed and needs no more gradients."""
        if step > self._closed:
            # A copy: engines pass gradients in shared memory, which is scarce.
            gradient = self._spare.pop() if self._spare else self._parameters.layout.new(CPU)
            self._fill(gradient, image)
            self._shards[ticket] = (step, gradient)

    @torch.no_grad()
    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Add a shard to the sum of its step, as far as the order of the tree allows."""
        if step not in self._sums:
            self._sums[step] = TreeSum(leaves, self._sum)
        _, gradient = self._shards.pop(ticket)
        with intra_op_threads(self._threads):
            self._sums[step].put((0, shard), gradient)

    @torch.no_grad()
    def do(self, told: Mapping[str, Any], image: Image) -> Answer:
        """Answer a request of the coordinator."""
        match told["kind"]:
            case "make":
                self._make(told, image)
                return {}, self._image(self._parameters)
            case "set":
                self._fill(self._parameters, image)
                return {}, self._image(self._parameters)
            case "add":
                return self._add(told), NO_IMAGE
            case "step":
                self._step(told)
                return {}, self._image(self._parameters)
            case "average":
                assert self._average is not None
                self._average.update(told["n"])
                return {}, NO_IMAGE
            case "averaged":
                assert self._average is not None
                return {}, self._image(self._average.shadow)
            case "state":
                return self._state()
        raise ValueError(f"a server was asked for {told['kind']!r}")

    # --- state ------------------------------------------------------------------------------------

    def _make(self, made: Mapping[str, Any], image: Image) -> None:
        """Receive a slice of everything: parameters, averages, the optimizer and its state."""
        self._pieces = [Piece(*piece) for piece in made["pieces"]]
        self._number = {piece.name: str(n) for n, piece in enumerate(self._pieces)}
        layout = Layout(
            (str(n), torch.empty(p.length, dtype=getattr(torch, p.dtype)))
            for n, p in enumerate(self._pieces)
        )
        # As many as a coordinator without servers uses; the bits do not depend on the number.
        self._threads = cores_for(made["elements"])
        self._spare, self._mean = [], None
        self._parameters = layout.shared()
        named = {n: torch.nn.Parameter(view) for n, view in self._parameters.views.items()}
        model = torch.nn.ParameterDict(named)
        bind(named, self._parameters)
        self._fill(self._parameters, image[: layout.nbytes])
        self._average = None
        if made["ema_decay"] is not None:
            self._average = Average(made["ema_decay"], self._parameters)
            self._fill(self._average.shadow, image[layout.nbytes : 2 * layout.nbytes])
        rest = image[layout.nbytes * (1 if self._average is None else 2) :]
        self._optimizer = FlatOptimizer(
            lambda _: self._made(made["optimizer"], made["groups"], named), model, self._parameters
        )
        state: dict[str, dict[str, Any]] = {number: {} for number in named}
        lengths = {piece.name: piece.length for piece in self._pieces}
        for name, entry, value in taken(made["state"], lengths, rest):
            state[self._number[name]][entry] = value
        self._optimizer.load(self._optimizer.loadable(state))

    def _made(
        self, kind: str, groups: list[Any], named: Mapping[str, torch.nn.Parameter]
    ) -> Optimizer:
        """Return an optimizer of torch over the pieces, with the groups of the user's optimizer."""
        of = {known.__name__: known for known in ELEMENTWISE}[kind]
        own = []
        for names, values in groups:
            numbers = (self._number[name] for name in names if name in self._number)
            params = [named[number] for number in numbers]
            own.append({**self._values(values), "params": params})
        return of(own)  # type: ignore[call-arg]

    def _state(self) -> Answer:
        """Return the optimizer's state of the pieces."""
        state = self._optimizer.state()

        def entries() -> Iterator[Entry]:
            for number, piece in enumerate(self._pieces):
                for entry, value in state[str(number)].items():
                    yield (
                        piece.name,
                        entry,
                        value.detach() if is_by_element(entry, value) else value,
                    )

        listed, image = told(entries())
        return {"state": listed}, image

    # --- an update --------------------------------------------------------------------------------

    def _add(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Finish and divide the sum of a step; return whether all is finite, and squared norms."""
        step, tree, additions = told["step"], self._sums[told["step"]], list[Addition]()

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
        self._end_step(step, total)
        squares = found.squares if found.is_finite and told["wants_norm"] else []
        return {"is_finite": found.is_finite, "odd": odd, "squares": squares}

    def _end_step(self, step: int, total: Flat) -> None:
        """Close a step, and reuse the memory of gradients of this step and earlier steps."""
        self._closed = step
        late = [ticket for ticket, (of, _) in self._shards.items() if of <= step]
        self._spare += [self._shards.pop(ticket)[1] for ticket in late]
        self._sums = {of: tree for of, tree in self._sums.items() if of > step}
        if self._mean is not None:
            self._spare.append(self._mean)
        self._mean = total

    def _sum(self, left: Flat, right: Flat) -> Flat:
        """Return left + right, in the memory of the left operand."""
        left.add_(right)
        self._spare.append(right)
        return left

    def _step(self, told: Mapping[str, Any]) -> None:
        """Make the update from the newest mean."""
        mean = self._mean
        assert mean is not None
        for group, values in zip(self._optimizer.inner.param_groups, told["groups"], strict=True):
            group.update(self._values(values))
        missing = [self._number[name] for name in told["missing"] if name in self._number]
        with intra_op_threads(self._threads):
            if told["factor"] != 1.0:
                mean.mul_(told["factor"])
            self._optimizer.step(mean, missing)

    # --- memory -----------------------------------------------------------------------------------

    def _fill(self, flat: Flat, image: Image) -> None:
        at = 0
        for vector in flat.vectors:
            target = as_bytes(vector)
            target[:] = image[at : at + target.nbytes]
            at += target.nbytes

    def _image(self, flat: Flat) -> Image:
        """Return the bytes of vectors in a shared segment, without a copy."""
        nbytes = flat.layout.nbytes
        return flat.segment.array(nbytes) if nbytes and flat.segment is not None else NO_IMAGE

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: from_json(value) for name, value in values.items()}
