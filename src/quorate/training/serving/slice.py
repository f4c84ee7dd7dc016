"""A slice on a server: sums of gradients, and updates of its parameters. No part of a transport.

Its pieces of parameters are laid out as they lie in the whole vectors, and an optimizer of the
user's kind is over them: so what is true of whole vectors, which stretch is updated at once, and
where it is cut as parameters have no gradient, is true here too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from quorate.coordination.tree import tree_sum
from quorate.machine.cores import usable_cores
from quorate.replica.flat import Flat, Layout
from quorate.replica.model import bind
from quorate.training.optimizing.extent import squares
from quorate.training.optimizing.known_optimizers import ELEMENTWISE
from quorate.training.optimizing.not_finite import are_finite, not_finite
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.update import ALL_CORES_FROM, Average, intra_op_threads
from quorate.training.serving.pieces import (
    Entry,
    Piece,
    from_json,
    is_by_element,
    taken,
    told,
)
from quorate.transports.servers import NO_IMAGE, Answer, Image, as_bytes


class _Term(NamedTuple):
    """A shard's slice, or a sum of some; an image that was sent is not written."""

    flat: Flat
    is_own: bool


class Slice:
    """What a server has, and does with it. The first word to it is ``make``."""

    def __init__(self) -> None:
        self._shards: dict[int, tuple[int, Image]] = {}  # by ticket: step, gradient
        self._closed = -1  # steps up to this one are over
        self._spare: list[Flat] = []  # memory for sums
        self._mean: Flat | None = None  # of the newest step

    def take(self, ticket: int, step: int, image: Image) -> None:
        """Take a shard's gradient, unless its step is over: then nobody will ask for it."""
        if step > self._closed:
            self._shards[ticket] = (step, image)

    @torch.no_grad()
    def do(self, told: Mapping[str, Any], image: Image) -> Answer:
        """Do what the coordinator asks for."""
        match told["kind"]:
            case "make":
                self._make(told, image)
                return {}, self._image(self._parameters)
            case "set":
                self._set(image)
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

    # --- what it has ------------------------------------------------------------------------------

    def _make(self, made: Mapping[str, Any], image: Image) -> None:
        """Take a slice of everything: parameters, averages, the optimizer and its state."""
        self._pieces = [Piece(*piece) for piece in made["pieces"]]
        self._number = {piece.name: str(n) for n, piece in enumerate(self._pieces)}
        layout = Layout(
            (str(n), torch.empty(p.length, dtype=getattr(torch, p.dtype)))
            for n, p in enumerate(self._pieces)
        )
        # As many as a coordinator takes that has it all; the bits do not depend on it.
        self._threads = usable_cores() if made["elements"] >= ALL_CORES_FROM else 1
        self._spare, self._mean = [], None
        self._parameters = layout.shared()
        named = {str(n): torch.nn.Parameter(view) for n, view in self._views(self._parameters)}
        model = torch.nn.ParameterDict(named)
        bind(named, self._parameters)
        self._set(image[: layout.nbytes])
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
        """Return an optimizer of torch's over the pieces, with the groups that the user's has."""
        of = {known.__name__: known for known in ELEMENTWISE}[kind]
        own = []
        for names, values in groups:
            numbers = (self._number[name] for name in names if name in self._number)
            params = [named[number] for number in numbers]
            own.append({**self._values(values), "params": params})
        return of(own)  # type: ignore[call-arg]

    def _set(self, image: Image) -> None:
        """Take other values of the parameters."""
        self._fill(self._parameters, image)

    def _state(self) -> Answer:
        """Return what the optimizer keeps of the pieces."""
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
        """Add the shards of a step, and divide; say whether all is finite, and squared norms."""
        step, leaves, weight = told["step"], told["leaves"], told["weight"]
        parts = [
            ((level, index), _Term(self._over(self._shards[ticket][1]), is_own=False))
            for level, index, ticket in told["parts"]
        ]
        with intra_op_threads(self._threads):
            total = tree_sum(parts, leaves, self._sum, len(parts))
            finite = are_finite(total.flat)
            mean = total.flat if total.is_own else self._room()
            if finite:
                for into, vector in zip(mean.vectors, total.flat.vectors, strict=True):
                    torch.div(vector, weight, out=into)
        odd = [] if finite else [self._pieces[int(n)].name for n in not_finite(total.flat)]
        self._closed = step
        self._shards = {t: kept for t, kept in self._shards.items() if kept[0] > step}
        if self._mean is not None:
            self._spare.append(self._mean)
        self._mean = mean
        answer: dict[str, Any] = {"is_finite": finite, "odd": odd, "squares": []}
        if finite and told["wants_norm"]:
            with intra_op_threads(1):
                answer["squares"] = [squares(vector) for vector in mean.vectors]
        return answer

    def _sum(self, left: _Term, right: _Term) -> _Term:
        """Return left + right, in memory of our own: that of one of them, if it is."""
        own = left if left.is_own else right if right.is_own else _Term(self._room(), is_own=True)
        pairs = zip(left.flat.vectors, right.flat.vectors, own.flat.vectors, strict=True)
        for one, other, into in pairs:
            torch.add(one, other, out=into)
        if left.is_own and right.is_own:
            self._spare.append(right.flat)
        return own

    def _step(self, told: Mapping[str, Any]) -> None:
        """Make the update, from the mean that was found last."""
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

    def _room(self) -> Flat:
        return (
            self._spare.pop() if self._spare else self._parameters.layout.new(torch.device("cpu"))
        )

    def _over(self, image: Image) -> Flat:
        """Return vectors over bytes that were sent: they are read only."""
        layout, at, vectors = self._parameters.layout, 0, []
        for size, dtype in zip(layout.sizes, layout.dtypes, strict=True):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not writable.*")
                vectors.append(torch.frombuffer(image, dtype=dtype, count=size, offset=at))
            at += size * dtype.itemsize
        return Flat(layout, vectors)

    def _fill(self, flat: Flat, image: Image) -> None:
        at = 0
        for vector in flat.vectors:
            target = as_bytes(vector)
            target[:] = image[at : at + target.nbytes]
            at += target.nbytes

    def _image(self, flat: Flat) -> Image:
        """Return the bytes of vectors that lie in one segment: no copy."""
        nbytes = flat.layout.nbytes
        return flat.segment.array(nbytes) if nbytes and flat.segment is not None else NO_IMAGE

    def _views(self, flat: Flat) -> Iterator[tuple[str, torch.Tensor]]:
        yield from flat.views.items()

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: from_json(value) for name, value in values.items()}
