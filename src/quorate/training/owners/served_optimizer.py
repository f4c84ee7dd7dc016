"""The optimizer of a coordinator whose updates are made by servers.

While servers have the state, the coordinator's own parameters, averages and optimizer state are
copies from the last time they were fetched. A reader calls ``fetch_parameters`` first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import closing
from typing import Any

import torch

from quorate.engines.partition import Partition
from quorate.engines.servers import Answer, RemoteGradient, Servers, as_image, read_image
from quorate.errors import ServerError, SettingError
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.entries import listed, of_pieces, vectors
from quorate.training.optimizing.known_optimizers import sent_values, storable_values
from quorate.training.optimizing.mean import Addition, Mean
from quorate.training.optimizing.optimizer import OptimizerFactory
from quorate.training.owners import server_files, slice_files
from quorate.training.owners.slice_files import Rows, StateFile
from quorate.training.owners.spread_optimizer import LentStates, SpreadOptimizer

HANDLER = "quorate.training.owners.server_slice:Slice"  # the code of servers for a slice


class ServedOptimizer(SpreadOptimizer):
    """The user's optimizer, with its state and steps on servers.

    Without servers, before and after a loop, all of the state is in this process.

    Args:
        factory: the user's function from a list of parameters to an optimizer.
        model: the model whose trainable parameters are views of ``parameters``.

    Raises:
        SettingError: the factory returns no optimizer, or one that needs whole parameters.
    """

    refuses_rows = "servers", "some"

    def __init__(self, factory: OptimizerFactory, model: torch.nn.Module, parameters: Flat) -> None:
        super().__init__(factory, model, parameters)
        if not self.uses_vectors:
            expected = "none: this optimizer does not work element by element, and so not in slices"
            fix = "leave servers out, or take one that does, torch.optim.AdamW for example"
            raise SettingError("servers", type(self.user_optimizer).__name__, expected, fix)
        self._servers: Servers | None = None  # None: the coordinator has everything
        self._average: Average | None = None
        self._is_home = True  # whether the coordinator's parameters and averages are current
        self._added: list[dict[str, Any]] = []  # the servers' results for the newest sum
        self.user_optimizer.state = LentStates(self._state_of, self.lend)

    # --- to the servers, and back -----------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """True if servers have the state."""
        return self._servers is not None

    @property
    def is_away(self) -> bool:
        """True if only servers have the newest state."""
        return self.is_on and not self.is_lent

    def begin(self, servers: Servers, average: Average | None) -> None:
        """Send a slice of everything to each server. Blocks."""
        self._servers, self._average = servers, average
        for tensor in self._held:
            tensor.grad = None  # gradients of steps made in this process
        layout, state = self.flat_parameters.layout, self.state()
        self.partition = Partition.among(layout, servers.count)
        groups = [*zip(self.groups, map(storable_values, self.param_groups), strict=True)]
        made, images = [], []
        for number in range(servers.count):
            own = of_pieces(state, self.partition.pieces(number))
            listing = listed(own)
            flats = [self.flat_parameters, *([] if average is None else [average.shadow])]
            slices = [part for flat in flats for part in self.partition.views(flat, number)]
            values = vectors(own, listing) if self.unread is None else []
            images.append(as_image([*slices, *values]))
            made.append(
                {
                    "kind": "make",
                    "layout": layout.described(),
                    "server": [number, servers.count],
                    "ema_decay": None if average is None else average.decay,
                    "optimizer": type(self.user_optimizer).__name__,
                    "groups": groups,
                    "state": listing,
                }
            )
        servers.renew(made, images)
        if self.unread is not None:
            rows = Rows(
                slice_files.rows_in(self.unread, listed(state), self.prefix), self.partition
            )
            with closing(StateFile(self.unread, is_read=True)) as file:
                mark = slice_files.mark(self.unread)
                server_files.move(servers, rows, file, first_mark=mark)
        self._is_home, self.is_lent, self.unread = True, False, None
        dict.clear(self.user_optimizer.state)

    def show(self) -> None:
        """Let workers compute from the servers' parameters: no change was made here."""
        assert self._servers is not None
        self._servers.have_newest = True

    def set(self) -> None:
        """Send the parameters to the servers after a change by user code. Blocks."""
        assert self._servers is not None
        own = (self.partition.views(self.flat_parameters, n) for n in range(self._servers.count))
        self._servers.renew([{"kind": "set"}] * self._servers.count, [*map(as_image, own)])

    def fetch_parameters(self) -> None:
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
            read_image(image, self.partition.views(self.flat_parameters, number))
        if self._average is not None:
            for number, (_, image) in enumerate(self._ask("averaged")):
                read_image(image, self.partition.views(self._average.shadow, number))
        self._is_home = True

    def fetch(self) -> None:
        """Fetch the state from the servers. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        answers = self._ask("state")
        self.put(self.joined([answer["state"] for answer, _ in answers]))
        whole = self.state()
        for number, (answer, image) in enumerate(answers):
            own = of_pieces(whole, self.partition.pieces(number))
            read_image(image, vectors(own, answer["state"]))

    def end(self) -> None:
        """Fetch everything, and end the use of servers. Blocks.

        Raises:
            ServerError: a server is gone; parameters and state not fetched are lost.
        """
        try:
            self.fetch_parameters()
            if self.is_away:
                self.fetch()
        finally:
            self._servers, self.is_lent = None, False

    # --- an update --------------------------------------------------------------------------------

    def mean(self, total: ShardSum, additions: Sequence[Addition], *, wants_norm: bool) -> Mean:
        """Let servers finish and divide the sum of a step. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        gradient = total.gradient
        if not isinstance(gradient, RemoteGradient):
            return super().mean(total, additions, wants_norm=wants_norm)
        for left, right in additions:
            left.add_(right)
        told = {"step": gradient.step, "shards": gradient.shards, "weight": total.divisor}
        self._added = [answer for answer, _ in self._ask("add", **told, wants_norm=wants_norm)]
        is_alright = math.isfinite(total.metrics["loss"])
        if not (is_alright and all(answer["is_finite"] for answer in self._added)):
            return Mean(gradient, False, None)
        squares = [answer["squares"] for answer in self._added]
        return Mean(gradient, True, self.partition.norm(squares) if wants_norm else None)

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the names of the parameters whose gradient has a non-finite element."""
        if not isinstance(gradient, RemoteGradient):
            return super().not_finite(gradient)
        odd = {name for answer in self._added for name in answer["odd"]}
        return [name for name in self.flat_parameters.layout.sections if name in odd]

    def step(
        self, gradient: Flat, missing: Collection[str] = (), closure: Closure | None = None
    ) -> None:
        """Let servers make the update from the newest mean. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        if not isinstance(gradient, RemoteGradient):
            self.read_all()
            super().step(gradient, missing, closure)
            return
        self.require_same_groups()
        assert self._servers is not None
        self._is_home = False
        groups = [*map(sent_values, self.param_groups)]
        step = {"kind": "step", "missing": sorted(missing), "groups": groups}
        self._servers.renew([{**step, "factor": gradient.factor}] * self._servers.count)
        self.user_optimizer.step()  # no tensor has a gradient: only a schedule counts it

    def add_to_average(self, average: Average, n: int) -> None:
        """Let servers add update n to their averages. Blocks."""
        if self.is_on:
            self._ask("average", n=n)
        else:
            super().add_to_average(average, n)

    def _ask(self, kind: str, **named: Any) -> list[Answer]:
        if self._servers is None:
            raise ServerError("the servers of this run have ended")
        return self._servers.ask([{"kind": kind, **named}] * self._servers.count)
