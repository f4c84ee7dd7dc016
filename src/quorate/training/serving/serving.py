"""Serving: the coordinator's connection to the state on servers.

The coordinator's own parameters, averages and optimizer state are copies from the last time they
were fetched. A reader calls ``bring_home`` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quorate.engines.servers import Answer, RemoteGradient, Servers, VectorSlices, joined
from quorate.errors import ServerError
from quorate.replica.flat import Flat
from quorate.training.optimizing.extent import root
from quorate.training.serving.pieces import (
    Entry,
    Piece,
    in_memory_order,
    is_by_element,
    pieces,
    shaped,
    taken,
    to_json,
    told,
)

OptimizerState = dict[str, dict[str, Any]]  # by parameter, then by entry


class Serving:
    """Requests to servers. Without servers, nothing is done.

    Args:
        parameters: the coordinator's parameters.
        ema_decay: decay of averaged parameters, if there are any.
        wants_norm: whether updates need the norm of the gradient.
    """

    handler = "quorate.training.serving.slice:Slice"  # the code of servers for a slice

    def __init__(self, parameters: Flat, *, ema_decay: float | None, wants_norm: bool) -> None:
        self._parameters = parameters
        self._ema_decay = ema_decay
        self._wants_norm = wants_norm
        self._shadow: Flat | None = None
        self._servers: Servers | None = None  # None: the coordinator has everything
        self._is_home = True  # whether the coordinator's parameters and averages are current
        self._added: list[dict[str, Any]] = []  # the servers' results for the newest sum

    @property
    def is_on(self) -> bool:
        """True if servers have the state."""
        return self._servers is not None

    def average(self, shadow: Flat) -> None:
        """Note the memory of averaged parameters."""
        self._shadow = shadow

    # --- to the servers, and back
    # ------------------------------------------------------------------

    def begin(
        self, servers: Servers, kind: str, groups: Sequence[Any], state: OptimizerState
    ) -> None:
        """Send a slice of everything to each server. Blocks.

        Args:
            kind: name of the optimizer in torch.optim.
            groups: names and values of each group.
            state: state of the optimizer.
        """
        self._servers = servers
        layout = self._parameters.layout
        self._slicing = slicing = VectorSlices(layout, servers.count)
        self._pieces = [pieces(layout, stretches) for stretches in slicing.of]
        made, images = [], []
        for number, own in enumerate(self._pieces):
            listed, image = told(_entries(own, state))
            flats = [self._parameters, *([] if self._shadow is None else [self._shadow])]
            images.append(joined([*(slicing.cut(flat, number) for flat in flats), image]))
            made.append(
                {
                    "kind": "make",
                    "pieces": own,
                    "elements": sum(layout.sizes),
                    "ema_decay": self._ema_decay,
                    "optimizer": kind,
                    "groups": [[names, to_values(values)] for names, values in groups],
                    "state": listed,
                }
            )
        servers.renew(made, images)
        self._is_home = True

    def show(self) -> None:
        """Let workers compute from the servers' parameters: no change was made here."""
        assert self._servers is not None
        self._servers.have_newest = True

    def set(self) -> None:
        """Send the parameters to the servers after a change by user code. Blocks."""
        assert self._servers is not None
        count = self._servers.count
        images = [self._slicing.cut(self._parameters, number) for number in range(count)]
        self._servers.renew([{"kind": "set"}] * count, images)

    def bring_home(self) -> None:
        """Fetch parameters and averages, if updates were made since. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        if self._servers is None:
            return
        self._servers.have_newest = False  # the caller may change and evaluate the parameters
        if self._is_home:
            return
        for number, image in enumerate(self._servers.values()):
            self._slicing.put(self._parameters, number, image)
        if self._shadow is not None:
            for number, (_, image) in enumerate(self._ask("averaged")):
                self._slicing.put(self._shadow, number, image)
        self._is_home = True

    def state(self) -> OptimizerState:
        """Return the state of the optimizer, from all servers. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        sections = self._parameters.layout.sections
        state: OptimizerState = {name: {} for name in sections}
        for own, (answer, image) in zip(self._pieces, self._ask("state"), strict=True):
            by_name = {piece.name: piece for piece in own}
            lengths = {piece.name: piece.length for piece in own}
            for name, entry, value in taken(answer["state"], lengths, image):
                if not is_by_element(entry, value):
                    state[name][entry] = value  # the same on all servers
                    continue
                section, piece = sections[name], by_name[name]
                if entry not in state[name]:
                    whole = value.new_empty(max(1, section.span))
                    state[name][entry] = shaped(whole, section)
                order = in_memory_order(state[name][entry])
                order[piece.start : piece.stop] = value
        return state

    def end(self) -> None:
        """End the use of servers, after ``bring_home``; parameters not fetched are lost."""
        self._servers = None

    # --- an update --------------------------------------------------------------------------------

    def add(self, gradient: RemoteGradient, weight: float) -> bool:
        """Let servers finish and divide the sum of a step; return whether all is finite. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        told = {"step": gradient.step, "shards": gradient.shards, "weight": weight}
        answers = self._ask("add", **told, wants_norm=self._wants_norm)
        self._added = [answer for answer, _ in answers]
        return all(answer["is_finite"] for answer in self._added)

    def not_finite(self) -> list[str]:
        """Return the parameters with a non-finite element in the gradient of the newest sum."""
        odd = {name for answer in self._added for name in answer["odd"]}
        return [name for name in self._parameters.layout.sections if name in odd]

    def norm(self) -> float:
        """Return the norm of the newest mean."""
        by_vector: list[list[float]] = [[] for _ in self._parameters.vectors]
        for stretches, answer in zip(self._slicing.of, self._added, strict=True):
            found = iter(answer["squares"])
            for blocks, stretch in zip(by_vector, stretches, strict=True):
                blocks += next(found) if stretch else []
        return root(by_vector)

    def step(self, factor: float, missing: Iterable[str], groups: Iterable[dict[str, Any]]) -> None:
        """Let servers make the update from the newest mean. Blocks.

        Args:
            factor: factor for the mean.
            missing: parameters without a gradient.
            groups: values of the optimizer's groups.

        Raises:
            ServerError: a server is gone.
        """
        assert self._servers is not None
        self._is_home = False
        values = [to_values(group) for group in groups]
        step = {"kind": "step", "factor": factor, "missing": [*missing], "groups": values}
        self._servers.renew([step] * self._servers.count)

    def average_after(self, n: int) -> None:
        """Let servers add update n to their averages. Blocks."""
        self._ask("average", n=n)

    def _ask(self, kind: str, **named: Any) -> list[Answer]:
        if self._servers is None:
            raise ServerError("the servers of this run have ended")
        return self._servers.ask([{"kind": kind, **named}] * self._servers.count)


def to_values(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group for JSON, without functions, which the optimizer here calls."""
    return {
        name: to_json(value)
        for name, value in group.items()
        if name != "params" and not callable(value)
    }


def _entries(own: Iterable[Piece], state: OptimizerState) -> Iterator[Entry]:
    """Yield the entries of a state that belong to the pieces of a slice."""
    for piece in own:
        for entry, value in state[piece.name].items():
            if is_by_element(entry, value):
                value = in_memory_order(value)[piece.start : piece.stop]
            yield piece.name, entry, value
