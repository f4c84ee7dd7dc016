"""An actor with one worker process on its node, which passes on messages in both directions.

The worker is a process of its own, as on the coordinator's machine: the script, and all that it
loads, has a main thread and no threads of Ray's, so that it may fork. The actor and its worker
share memory as a coordinator and its workers do, and copies travel: parameters with the order that
needs them, a shard's result with the answer.
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from msgspec import structs

from quorate.engines.messages import pack, unpack
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.alarm import Alarm
from quorate.engines.processes.arena import Arena, Image
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import WorkerProcess
from quorate.engines.processes.process_start import SpawnStarter
from quorate.engines.ray.gradient_pusher import GradientPusher
from quorate.engines.ray.handover import hand_over
from quorate.engines.ray.images import (
    START_READER,
    ActorHello,
    ActorLeaves,
    ActorMessage,
    ActorStarted,
    ArenaPart,
    News,
    WorkerCut,
    WorkerEnded,
    arena_like,
    image_of,
    same_everywhere,
)
from quorate.engines.ray.node_adder import NodeAdder
from quorate.engines.ray.shard_orders import GivenShard, likely_order
from quorate.engines.servers import VectorSlices
from quorate.machine import this_host
from quorate.machine.limits import RANK_POLL_S
from quorate.machine.resources import oom_kills, usable_cores
from quorate.machine.shared_memory import Segment

# With an image of each part.
Order = tuple[messages.WorkerMessage, list[ArenaPart], tuple[Image, ...]]


class WorkerActor:
    """One worker of this node. Ray calls ``serve``, ``tell`` and ``add`` in a thread each.

    Ray makes the actor in the main thread, where signals are handled.

    Args:
        number: of the worker.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._raylet = os.getppid()
        self._selector = selectors.DefaultSelector()
        self._alarm = Alarm(self._selector)
        self._news: deque[bytes | Image] = deque()  # a message says whether an image follows
        self._told_at = 0.0  # when the newest message was added
        self._told: dict[int, Order] = {}  # by number
        self._taken = 0  # the number of the next order
        # Orders that wait for the worker's answer to the order before.
        self._orders: deque[Order] = deque()
        self._shard: GivenShard | None = None  # the newest, until the coordinator has the answer
        self._slot = 0  # of the arena, for the newest result; there are two
        self._cancelled: int | None = None  # ticket
        self._arena: Arena | None = None
        self._adder: NodeAdder | None = None
        self._pusher: GradientPusher | None = None
        self._servers = 0
        self._slicing: VectorSlices | None = None
        self._is_cut = False
        self._leaves = False
        signal.signal(signal.SIGTERM, self._leave)  # Ray's own handler ends the process at once

    def _leave(self, *_: object) -> None:
        """Tell the coordinator that this actor has to end; a second time, end."""
        if self._leaves:
            os._exit(1)
        self._leaves = True
        self._alarm.ring()

    def __repr__(self) -> str:
        """Return the text that Ray writes before each line that the worker prints."""
        return f"quorate worker {self._number}"

    def tell(self, number: int, message: bytes, parts: list[ArenaPart], *images: Image) -> None:
        """Take an order. Orders are carried out by number: calls may overtake each other."""
        self._told[number] = messages.READER.unpack(message), parts, images
        self._alarm.ring()

    def add(self, told: bytes, *images: Image) -> Image:
        """Return the sum of results of workers of this node."""
        assert self._arena is not None  # one of the results is this worker's
        self._adder = self._adder or NodeAdder(self._arena)
        message = unpack(told)
        return self._adder.sum(dict(zip(message["of"], images, strict=True)), message["shards"])

    def serve(self, start: bytes, *servers: Any) -> Iterator[bytes | Image]:
        """Start the worker, and yield its news until it has ended; the last says how.

        Args:
            start: an ``ActorStart``.
            servers: the actors that receive gradients; none: the coordinator receives gradients.
        """
        told = START_READER.unpack(start)
        self._pusher = GradientPusher(servers, self._alarm.ring) if servers else None
        self._servers = len(servers)
        script = told.script
        if told.folder is not None:  # Ray has put its copy into this process's folder
            script = script.within(Path(told.folder), Path.cwd())
        here, mark = ray.get_runtime_context().get_node_id(), this_host.mark()
        same = same_everywhere(told.script, script)
        self._say(ActorHello(same, this_host.name(), mark, here))
        yield from self._said()
        kills = oom_kills()
        try:
            starter = SpawnStarter(script, spins=told.threads <= usable_cores())
            process = WorkerProcess(self._number, script, starter)
        except OSError as error:
            self._say(WorkerEnded(Ending(1, str(error))))
            yield from self._said()
            return
        try:
            process.watch(self._selector, _look_at_everything, _look_at_everything)
            near = (told.node, told.mark) == (here, mark)
            near = near and self._handed_over(process, told.door, told.key)
            self._say(ActorStarted(process.pid, near))
            yield from self._said()
            has_said_leaves = False
            while not process.has_ended():
                if os.getppid() != self._raylet:
                    os._exit(1)  # Ray on this node is gone; Ray may take seconds to end this actor
                for key, _ in self._selector.select(RANK_POLL_S):
                    key.data()
                if not near:
                    self._pass_on(process)
                if self._leaves and not has_said_leaves:
                    has_said_leaves = True
                    self._say(ActorLeaves())
                yield from self._said()
            if not near:
                self._pass_on(process)  # messages sent before the end count
            self._say(WorkerEnded(process.ending().explained(kills)))
            yield from self._said()
        finally:
            process.close()

    def _handed_over(self, process: WorkerProcess, door: str | None, key: str) -> bool:
        """Hand the worker over to a coordinator on this node; return False if not possible."""
        if door is None or process.exit is None or process.line.has_unsent:
            return False
        if not hand_over(door, key, process.line, process.exit):
            return False
        process.deaf()
        process.line.close()  # the coordinator's end alone keeps the wire open
        return True

    def _pass_on(self, process: WorkerProcess) -> None:
        """Pass on all that has come, in both directions."""
        process.flush()
        for message in process.arrived():
            if isinstance(message, messages.ShardsDone) and message.memory is not None:
                message.memory = message.memory.map[:]  # another host cannot map it
            self._take_message(process, message)
        if process.is_cut and not self._is_cut:
            self._is_cut = True
            process.deaf()
            self._say(WorkerCut())
        while self._taken in self._told:
            self._take_order(process, *self._told.pop(self._taken))
            self._taken += 1
        self._carry_out_orders(process)
        for message, rest in () if self._pusher is None else self._pusher.arrived():
            self._say(message, rest)
        computes = self._shard is not None and self._shard.answer is None
        if computes and time.monotonic() - self._told_at > RANK_POLL_S:
            self._say(None)

    # --- answers of the worker --------------------------------------------------------------------

    def _take_message(self, process: WorkerProcess, message: messages.WorkerMessage) -> None:
        """Take a message of the worker: the answer to a speculative shard may have to wait."""
        shard = self._shard
        if shard is None or not isinstance(message, messages.Answer):
            self._say(message)
            return
        shard.answer = message
        if shard.is_wrong:
            self._shard = None
        else:
            self._answer(process, shard)

    def _answer(self, process: WorkerProcess, shard: GivenShard) -> None:
        """Answer the coordinator, once order and answer are there; the worker goes on at once."""
        if shard.order is None or shard.answer is None:
            return
        self._shard = None
        order, answer = shard.order, shard.answer
        answer.ticket = order.ticket
        is_done = isinstance(answer, messages.ShardsDone)
        following = likely_order(order) if is_done and not self._orders else None
        if following is not None:
            self._give(process, following, None)
        if not isinstance(answer, messages.ShardsDone) or order.slots == [None]:
            self._say(answer)
            return
        assert self._arena is not None
        if self._pusher is None:
            # Ray copies the image before the worker gets an order that overwrites the slot.
            self._say(answer, image_of(self._arena, ArenaPart.RESULT, shard.slot))
        else:
            assert self._slicing is not None
            rest = image_of(self._arena, ArenaPart.REST, shard.slot)
            gradient = self._arena.slot(shard.slot).flat
            self._pusher.push(answer, order.step, gradient, self._slicing, rest)

    # --- orders of the coordinator ----------------------------------------------------------------

    def _take_order(self, process: WorkerProcess, *order: *Order) -> None:
        """Carry out an order at once, or note the order until the worker has answered."""
        match order[0]:
            case messages.CancelShards(ticket):
                self._cancel(ticket)
            case messages.EndWorker():
                process.post(order[0])
            case _:
                self._orders.append(order)

    def _carry_out_orders(self, process: WorkerProcess) -> None:
        """Carry out waiting orders, as far as the worker is free."""
        while self._orders:
            order, parts, images = self._orders[0]
            shard = self._shard
            if shard is not None and shard.order is None and not shard.is_wrong:
                if isinstance(order, messages.ComputeShards) and not parts and shard.matches(order):
                    self._orders.popleft()
                    shard.order = order
                    if order.ticket == self._cancelled:
                        self._cancel(order.ticket)
                    self._answer(process, shard)
                    continue
                if shard.answer is None:
                    shard.is_wrong = True
                    self._cancel(shard.given.ticket)
                else:
                    self._shard = None
            if self._shard is not None:
                return
            self._orders.popleft()
            self._carry_out(process, order, parts, images)

    def _carry_out(self, process: WorkerProcess, *order: *Order) -> None:
        """Pass an order on to the worker, which reads none of the written memory meanwhile."""
        message, parts, images = order
        parts = [
            part for part in parts for _ in range(self._servers if part == ArenaPart.SLICES else 1)
        ]
        if isinstance(message, messages.ShareMemory):
            self._arena = arena_like(message)
            if self._servers:
                self._slicing = VectorSlices(self._arena.parameters.layout, self._servers)
        arena = self._arena
        assert arena is not None
        owned: list[Segment] = []  # until they are sent, in the order of their descriptors
        slices = itertools.count()
        for part, image in zip(parts, images, strict=True):
            if part == ArenaPart.SLICES:
                assert self._slicing is not None
                self._slicing.put(arena.parameters, next(slices), image)
            elif part in (ArenaPart.SHARED, ArenaPart.START):
                owned.append(Segment(image.nbytes))
                owned[-1].array(image.nbytes)[:] = image
            else:
                slot = arena.snapshots[0] if part == ArenaPart.SNAPSHOT else None
                image_of(arena, part, slot)[:] = image
        fds = [segment.fd for segment in owned]
        if isinstance(message, messages.ComputeShards):
            self._give(process, message, message, *fds)
            if message.ticket == self._cancelled:
                self._cancel(message.ticket)
            return
        if isinstance(message, messages.ShareMemory):
            message.description, fds = arena.handed_over()
        process.post(message, *fds)

    def _give(
        self,
        process: WorkerProcess,
        given: messages.ComputeShards,
        order: messages.ComputeShards | None,
        *fds: int,
    ) -> None:
        """Have the worker compute a shard, ordered by the coordinator or speculative."""
        assert self._arena is not None
        self._slot = 1 - self._slot
        self._shard = GivenShard(given, self._slot, order)
        snapshot = given.snapshot and (self._arena.snapshots[0], given.snapshot[1])
        slots: list[int | None] = [None] if given.slots == [None] else [self._slot]
        process.post(structs.replace(given, slots=slots, snapshot=snapshot), *fds)

    def _cancel(self, ticket: int) -> None:
        """Have the worker cancel a shard, under way or yet to be given."""
        shard = self._shard
        if shard is not None and shard.order is not None and shard.order.ticket == ticket:
            ticket = shard.given.ticket
        elif ticket >= 0:
            self._cancelled = ticket
        if self._arena is not None:
            self._arena.cancelled[self._number] = ticket

    # --- news for the coordinator -----------------------------------------------------------------

    def _said(self) -> Iterator[bytes | Image]:
        """Yield the news, each message and image once."""
        while self._news:
            yield self._news.popleft()

    def _say(self, message: ActorMessage | WorkerEnded | None, image: Image | None = None) -> None:
        """Add a message to the news, with the worker's status, and perhaps an image."""
        self._told_at = time.monotonic()
        news = News(message, has_image=image is not None)
        if self._arena is not None:
            doing = self._arena.sheets[self._number].read()
            age_s = time.monotonic() - doing.since
            news.doing = doing._replace(since=age_s)
            news.ahead = self._arena.loaded_ahead(self._number)
        self._news.append(pack(news))
        if image is not None:
            self._news.append(image)


def _look_at_everything() -> None:
    """Do nothing: each message, and the end of the worker, only wakes the actor."""
