"""Servers as owners: the coordinator's side. The side of a server is in ``server_slice.py``.

While servers have the state, the coordinator's own parameters, averages and optimizer state are
copies from the last time they were fetched. A reader calls ``fetch_parameters`` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from quorate.engines.partition import Partition
from quorate.engines.servers import Answer, Image, RemoteGradient, Servers, as_image, read_image
from quorate.errors import SettingError
from quorate.machine import this_host
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.entries import Listing
from quorate.training.optimizing.known_optimizers import sent_values, storable_values
from quorate.training.optimizing.mean import Addition, Mean
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.owners import Owners
from quorate.training.owners.slice_files import OwnerValues
from quorate.training.owners.spread_optimizer import SliceOwners, SpreadOptimizer

HANDLER = "quorate.training.owners.server_slice:ServerSlice"  # the code of servers for a slice


class ServerStandIn(Owners):
    """This process in place of servers: before servers take over, and after servers have ended."""

    refuses_rows = "servers", "some"

    def __init__(self, parameters: Flat) -> None:
        super().__init__(parameters, SpreadOptimizer)

    def add(self, optimizer: FlatOptimizer, *, shards: bool) -> None:  # noqa: ARG002
        """Take charge of an optimizer, whose state servers are to have.

        Raises:
            SettingError: the optimizer needs whole parameters.
        """
        if not optimizer.uses_vectors:
            expected = "none: this optimizer does not work element by element, and so not in slices"
            fix = "leave servers out, or take one that does, torch.optim.AdamW for example"
            raise SettingError("servers", type(optimizer.user_optimizer).__name__, expected, fix)


class ServerOwners(SliceOwners):
    """All servers of a loop.

    Args:
        parameters: the coordinator's parameters.
        servers: the servers.
        average: the coordinator's average; None without averaged weights.
        optimizer: the optimizer whose state servers are to have.
    """

    kind, leader = "server", "the coordinator"
    flushed_on = this_host.mark()

    def __init__(
        self,
        parameters: Flat,
        servers: Servers,
        average: Average | None,
        optimizer: SpreadOptimizer,
    ) -> None:
        super().__init__(parameters)
        self.partition = Partition.among(parameters.layout, servers.count)
        self._servers, self._average, self._optimizer = servers, average, optimizer
        self._is_home = True  # whether the coordinator's parameters and averages are current
        self._added: list[dict[str, Any]] = []  # the servers' results for the newest sum

    # --- an update --------------------------------------------------------------------------------

    def mean(self, total: ShardSum, additions: Sequence[Addition], *, wants_norm: bool) -> Mean:
        """Let servers finish and divide the sum of a step. Blocks.

        Raises:
            ServerError: a server is gone, as for the further methods.
        """
        gradient = total.gradient
        assert isinstance(gradient, RemoteGradient)
        for left, right in additions:
            left.add_(right)
        told: dict[str, Any] = {
            "step": gradient.step,
            "shards": gradient.shards,
            "weight": total.divisor,
        }
        self._added = [answer for answer, _ in self._ask("add", **told, wants_norm=wants_norm)]
        is_alright = math.isfinite(total.metrics["loss"])
        if not (is_alright and all(answer["is_finite"] for answer in self._added)):
            return Mean(gradient, False, None)
        squares = [answer["squares"] for answer in self._added]
        return Mean(gradient, True, self.partition.norm(squares) if wants_norm else None)

    def not_finite(self, gradient: Flat) -> list[str]:  # noqa: ARG002
        """Return the names of the parameters whose gradient has a non-finite element."""
        odd = {name for answer in self._added for name in answer["odd"]}
        return [name for name in self.partition.whole.sections if name in odd]

    def step(self, optimizer: FlatOptimizer, gradient: Flat, missing: Collection[str]) -> None:
        """Let servers make the update from the newest mean. Blocks."""
        assert isinstance(gradient, RemoteGradient)
        optimizer.require_same_groups()
        self._is_home = False
        groups = [*map(sent_values, optimizer.param_groups)]
        self._renew("step", missing=sorted(missing), groups=groups, factor=gradient.factor)
        optimizer.user_optimizer.step()  # no tensor has a gradient: only a schedule counts it

    def add_to_average(self, average: Average, n: int) -> None:  # noqa: ARG002
        """Let servers add update n to their averages. Blocks."""
        self._ask("average", n=n)

    # --- between updates --------------------------------------------------------------------------

    def send_user_changes(self, has_changed: Callable[[], bool]) -> None:
        """Send user code's changes to the servers; the whole state at the first call. Blocks."""
        if not self._optimizer.is_away:
            self._optimizer.send(self)
        elif has_changed():
            self._renew("set", [as_image(own) for own in self._views(self.parameters)])
        else:
            self._servers.have_newest = True  # workers may compute from the servers' parameters

    def fetch_parameters(self) -> None:
        """Fetch parameters and averages, if updates were made since. Blocks."""
        self._servers.have_newest = False  # the caller may change and evaluate the parameters
        if self._is_home:
            return
        for image, own in zip(self._servers.values(), self._views(self.parameters), strict=True):
            read_image(image, own)
        if self._average is not None:
            shadows = self._views(self._average.shadow)
            for (_, image), own in zip(self._ask("averaged"), shadows, strict=True):
                read_image(image, own)
        self._is_home = True

    # --- slices of the state ----------------------------------------------------------------------

    def make_slices(self, optimizer: SpreadOptimizer, listing: Listing) -> None:
        """Send a slice of parameters and averages to each server: see ``SliceOwners``. Blocks."""
        values, average = self._views(self.parameters), self._average
        if average is not None:
            pairs = zip(values, self._views(average.shadow), strict=True)
            values = [[*own, *shadow] for own, shadow in pairs]
        groups = map(storable_values, optimizer.param_groups)
        self._renew(
            "make",
            [*map(as_image, values)],
            layout=self.partition.whole.described(),
            ema_decay=None if average is None else average.decay,
            optimizer=type(optimizer.user_optimizer).__name__,
            groups=[*zip(optimizer.groups, groups, strict=True)],
            state=listing,
        )
        self._is_home = True

    def ask(self, prefix: str, kind: str, **told: Any) -> list[dict[str, Any]]:  # noqa: ARG002
        """Send a request to each server: see ``SliceOwners``. Blocks."""
        return [answer for answer, _ in self._ask(kind, **told)]

    def swap_rest(self, prefix: str, values: OwnerValues, *, sends: bool) -> None:  # noqa: ARG002
        """Send values to parts of each server, or receive values: see ``SliceOwners``. Blocks."""
        if sends:
            self._ask("put rest", [*map(as_image, values)])
            return
        for (_, image), into in zip(self._ask("get rest"), values, strict=True):
            read_image(image, into)

    # --- requests ---------------------------------------------------------------------------------

    def _views(self, whole: Flat) -> list[list[torch.Tensor]]:
        """Return the slice of each server of whole vectors, as views."""
        return [self.partition.views(whole, number) for number in range(self._servers.count)]

    def _ask(self, kind: str, images: Sequence[Image] = (), **named: Any) -> list[Answer]:
        return self._servers.ask(self._told(kind, named), images)

    def _renew(self, kind: str, images: Sequence[Image] = (), **named: Any) -> None:
        self._servers.renew(self._told(kind, named), images)

    def _told(self, kind: str, named: dict[str, Any]) -> list[dict[str, Any]]:
        count = self._servers.count
        return [{"kind": kind, "server": [number, count], **named} for number in range(count)]
