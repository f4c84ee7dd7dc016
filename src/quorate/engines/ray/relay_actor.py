"""A relay: an actor with the shared memory of a node, on behalf of all workers of the node.

The relay starts the workers of its node, as the coordinator starts the workers of its own: a fork
server imports torch once, and the script in a worker has a main thread and no threads of Ray's, so
that it may fork. Relay and workers share memory as a coordinator and its workers do, and copies
travel: parameters with the first order that needs them, results with an answer, or added up.
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

from quorate.engines.messages import pack
from quorate.engines.partition import Partition
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import Arena, ArenaDescription, ArenaPart
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import LocalPool, WorkerHandle
from quorate.engines.processes.script import Script
from quorate.engines.processes.wire import Alarm
from quorate.engines.ray.images import (
    ORDER_READER,
    NodeFacts,
    Part,
    RelayNews,
    RelayOrder,
    Reported,
    StartProcess,
    WorkerEnded,
    same_everywhere,
)
from quorate.engines.ray.relayed_worker import NodeSums, RelayedWorker, WorkerResult, add_up
from quorate.engines.ray.servers import WORK
from quorate.engines.servers import Image, as_image, read_image
from quorate.machine import this_host
from quorate.machine.limits import RANK_POLL_S
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat

NEWS, ORDERS = "news", "orders"  # threads of a relay

Order = tuple[int, RelayOrder, tuple[Image, ...]]


class RelayActor:
    """The relay of a node. Ray calls ``serve`` and ``tell`` in a thread each.

    Args:
        script: the fields of the script, as on the coordinator's host.
        folder: a folder with the script, sent to this process's working directory; None: none was
            sent.
        threads: intra-op threads of each worker.
        servers: the actors that receive gradients; none: the coordinator receives gradients.
    """

    arena: Arena  # from the first worker at its training loop on

    def __init__(
        self, script: dict[str, Any], folder: str | None, threads: int, *servers: Any
    ) -> None:
        theirs = own = Script(**script)
        if folder is not None:
            own = theirs.within(Path(folder), Path.cwd())
        self._same = same_everywhere(theirs, own)
        self._raylet = os.getppid()
        self._selector = selectors.DefaultSelector()
        self._alarm = Alarm(self._selector)
        self._pool = LocalPool(own, 1, threads=threads)
        self._pusher = GradientPusher(servers, self._alarm.ring) if servers else None
        self._servers = len(servers)  # that receive gradients
        self._told: dict[int, Order] = {}  # by number
        self._taken = 0  # the number of the next order
        self._news: deque[bytes | Image] = deque()  # a message says whether an image follows
        self._workers: dict[int, RelayedWorker] = {}  # by life
        self._description: tuple[ArenaDescription, list[int]] | None = None
        self.sums = NodeSums()
        # Ray's own handler ends the process at once, but workers first hand over, when their own
        # actors are asked to end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def __repr__(self) -> str:
        """Return the text that Ray writes before each line that a worker prints."""
        return f"quorate workers of {this_host.name()}"

    def tell(self, number: int, life: int, message: bytes, *images: Image) -> None:
        """Take an order. Orders are carried out by number: calls may overtake each other."""
        self._told[number] = life, ORDER_READER.unpack(message), images
        self._alarm.ring()

    def serve(self) -> Iterator[bytes | Image]:
        """Yield facts about the node, then the news of all workers."""
        self._say(RelayNews(None, NodeFacts(self._same)))
        while os.getppid() == self._raylet:
            while self._news:
                yield self._news.popleft()
            wait_s = max(0.0, min(RANK_POLL_S, self.sums.due() - time.monotonic()))
            for key, _ in self._selector.select(wait_s):
                key.data()
            self._pool.flush()
            while self._taken in self._told:
                self._take_order(*self._told.pop(self._taken))
                self._taken += 1
            for life, worker in list(self._workers.items()):
                if not worker.pass_on():
                    del self._workers[life]
            self.pass_on_sums()
            for result, rest in () if self._pusher is None else self._pusher.arrived():
                (slot,) = result.order.slots
                self.say(result.worker, result.answer, (ArenaPart.REST, slot, rest))
        os._exit(1)  # Ray on this node is gone; Ray may take seconds to end this actor

    # --- what workers have computed ---------------------------------------------------------------

    def take(self, result: WorkerResult) -> None:
        """Take the result of a shard: for servers, for a sum, or for the coordinator."""
        if self._pusher is not None:
            gradient = self.arena.slot(result.slot).flat
            rest = self.arena.image(ArenaPart.REST, result.slot)
            self._pusher.push(result, gradient, self._slicing, rest)
        elif not self.sums.done(result):
            self._pass_on([result])

    def pass_on_sums(self) -> None:
        """Send the coordinator all sums that wait no longer."""
        for results in self.sums.ready():
            self._pass_on(results)

    def _pass_on(self, results: list[WorkerResult]) -> None:
        """Send the coordinator a result, or the sum of results in the name of the first."""
        first, *others = results
        if others:
            add_up(self.arena, results)
            first.answer.others = [(each.worker.process.number, each.answer) for each in others]
        # Ray copies the image before the worker gets an order that overwrites the slot.
        image = self.arena.image(ArenaPart.RESULT, first.slot)
        self.say(first.worker, first.answer, (ArenaPart.RESULT, first.order.slots[0], image))

    # --- orders of the coordinator ----------------------------------------------------------------

    def _take_order(self, life: int, order: RelayOrder, images: tuple[Image, ...]) -> None:
        message = order.message
        if isinstance(message, StartProcess):
            self._start(life, message)
            return
        if isinstance(message, messages.ShareMemory) and self._description is None:
            self._make_arena(message.description)
        owned = self._write(order.parts, images)
        if (worker := self._workers.get(life)) is not None:  # else the coordinator hears of its end
            worker.take_order(message, owned)

    def _start(self, life: int, start: StartProcess) -> None:
        """Start a worker's process; an earlier process of the same number is gone first."""
        number = start.number
        for before, worker in list(self._workers.items()):
            if worker.process.number == number:
                del self._workers[before]
                worker.close()
        try:
            process = WorkerHandle(number)
            process.begin(self._pool, environment=start.environment)
        except OSError as error:
            self._say(RelayNews(life, WorkerEnded(Ending(1, str(error)))))
            return
        process.watch(self._selector, _look_at_everything, _look_at_everything)
        self._workers[life] = RelayedWorker(life, process, self)

    def _make_arena(self, description: ArenaDescription) -> None:
        """Make an arena like the coordinator's; the results of each worker take two slots."""
        self.arena = Arena.like(description)
        self._description = self.arena.handed_over()

    @cached_property
    def _slicing(self) -> Partition:
        return Partition.among(self.arena.parameters.layout, self._servers)

    def _write(self, parts: list[Part], images: tuple[Image, ...]) -> list[Segment]:
        """Write images to the arena; return segments with the images that have no place there.

        A worker may read what is written: in a shard that the coordinator has cancelled, or in a
        speculative shard. The results of both are dropped.
        """
        owned, slices = list[Segment](), itertools.count()
        for (part, slot), image in zip(parts, images, strict=True):
            if part in (ArenaPart.SHARED, ArenaPart.START):
                owned.append(Segment(image.nbytes))
                owned[-1].array(image.nbytes)[:] = image
                continue
            for worker in self._workers.values():
                worker.doubt()
            if part == ArenaPart.SLICES:
                flat = self.arena.parameters if slot is None else self.arena.slot(slot).flat
                read_image(image, self._slicing.views(flat, next(slices)))
            else:
                self.arena.image(part, slot)[:] = image
        return owned

    def send(
        self, worker: RelayedWorker, message: messages.WorkerMessage, segments: list[Segment]
    ) -> None:
        """Send a worker's process a message, with the arena of this node."""
        fds = [segment.fd for segment in segments]
        if isinstance(message, messages.ShareMemory):
            assert self._description is not None
            message.description, fds = self._description
        worker.process.post(message, *fds)

    # --- news for the coordinator -----------------------------------------------------------------

    def say(
        self,
        worker: RelayedWorker,
        message: Reported | None,
        image: tuple[ArenaPart, int | None, Image] | None = None,
    ) -> None:
        """Add a message of a worker to the news, with the worker's status, and perhaps an image.

        Args:
            image: with its part of a slot of the coordinator's arena.
        """
        worker.told_at = time.monotonic()
        news = RelayNews(worker.life, message)
        if self._description is not None:
            doing = self.arena.sheets[worker.process.number].read()
            news.doing = doing._replace(since=time.monotonic() - doing.since)
            news.ahead = self.arena.loaded_ahead(worker.process.number)
        if image is not None:
            news.image = image[:2]
        self._say(news)
        if image is not None:
            self._news.append(image[2])

    def _say(self, news: RelayNews) -> None:
        self._news.append(pack(news))


class GradientPusher:
    """Sends gradients to the servers, and holds the answers back until the gradients are there.

    The coordinator hears that a shard is done when all servers have its gradient: not before, so
    that nothing of a shard is lost with the node that computed it.

    Args:
        servers: actors.
        ring: called at each arrival, by any thread.
    """

    def __init__(self, servers: Sequence[Any], ring: Callable[[], None]) -> None:
        self._servers = servers
        self._ring = ring
        self._on_their_way: list[tuple[WorkerResult, Image, list[Future[Any]]]] = []

    def push(self, result: WorkerResult, gradient: Flat, slicing: Partition, rest: Image) -> None:
        """Send a gradient, which may be overwritten after the call. Does not block.

        Args:
            result: the worker's, held back until the arrival.
            rest: the result of the shard without the gradient, for the coordinator.
        """
        arrivals = []
        for number, server in enumerate(self._servers):
            take = server.take.options(concurrency_group=WORK)
            image = as_image(slicing.views(gradient, number))
            arrivals.append(take.remote(result.answer.ticket, image).future())
        result.answer.is_held = True
        self._on_their_way.append((result, rest.copy(), arrivals))
        for arrival in arrivals:
            arrival.add_done_callback(lambda _: self._ring())

    def arrived(self) -> Iterator[tuple[WorkerResult, Image]]:
        """Yield the results with arrived gradients, in order, with the rest of each result.

        A result whose gradient cannot be brought to a server is never given: the coordinator hears
        of the end of a server directly, and ends the run.
        """
        while self._on_their_way and all(a.done() for a in self._on_their_way[0][2]):
            result, rest, arrivals = self._on_their_way.pop(0)
            if all(arrival.exception() is None for arrival in arrivals):
                yield result, rest


def _look_at_everything() -> None:
    """Do nothing: each message, and the end of a worker, only wakes the relay."""
