"""An agent: an actor that has one worker process on its node, and passes on what goes to and fro.

The worker is a process of its own, as on the coordinator's machine: the script, and all that it
loads, has a main thread and no threads of Ray's, so that it may fork. What a coordinator and its
workers have in shared memory an agent and its worker have here, and copies travel: of parameters
with the shard that they are for, of a shard's result with the answer.
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from quorate.engines.messages import Message, pack, unpack
from quorate.engines.processes.alarm import Alarm
from quorate.engines.processes.arena import Arena, Image
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import WorkerProcess
from quorate.engines.processes.process_start import SpawnStarter
from quorate.engines.processes.script import Script
from quorate.engines.ray.gradient_pusher import GradientPusher
from quorate.engines.ray.handover import hand_over
from quorate.engines.ray.images import (
    ArenaPart,
    arena_like,
    image_of,
    same_everywhere,
)
from quorate.engines.ray.node_adder import NodeAdder
from quorate.engines.ray.speculative_shard import SpeculativeShard, guessed
from quorate.engines.servers import Slicing
from quorate.machine import this_host
from quorate.machine.limits import RANK_POLL_S
from quorate.machine.resources import oom_kills, usable_cores
from quorate.machine.shared_memory import Segment

ANSWERS = ("done", "failed", "left off")  # to a shard

Order = tuple[Message, tuple[Image, ...]]
News = bytes | Image  # a message, which says whether an image follows


class WorkerActor:
    """One worker of this node. Ray calls ``serve``, ``tell`` and ``add`` in a thread each.

    Args:
        number: of the worker.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._raylet = os.getppid()
        self._selector = selectors.DefaultSelector()
        self._alarm = Alarm(self._selector)
        self._told: dict[int, Order] = {}  # by number; taken out in their order
        self._taken = 0
        self._orders: deque[Order] = deque()  # that wait until its worker has answered
        self._computing: tuple[Message, int] | None = None  # order, slot: not answered yet
        self._guess: SpeculativeShard | None = None
        self._slot = 0  # of its arena, for the newest result; there are two
        self._cancelled: int | None = None  # ticket
        self._arena: Arena | None = None
        self._adder: NodeAdder | None = None
        self._pushed: GradientPusher | None = None
        self._servers = 0
        self._slicing: Slicing | None = None
        self._is_cut = False
        self._told_at = 0.0
        self._is_to_leave = self._has_said_so = False

    def be_asked_to_end(self, *_: object) -> None:
        """Let the coordinator know; a second time, end. A handler of signals."""
        if self._is_to_leave:
            os._exit(1)
        self._is_to_leave = True
        self._alarm.ring()

    def __repr__(self) -> str:
        """Return what Ray writes before each line that the worker prints."""
        return f"quorate worker {self._number}"

    def tell(self, number: int, message: bytes, *images: Image) -> None:
        """Take an order, whose number says when its turn is: calls may overtake each other."""
        self._told[number] = unpack(message), images
        self._alarm.ring()

    def add(self, told: bytes, *images: Image) -> Image:
        """Return the sum of results of workers of this node."""
        assert self._arena is not None  # one of them is this worker's
        self._adder = self._adder or NodeAdder(self._arena)
        message = unpack(told)
        return self._adder.sum(dict(zip(message["of"], images, strict=True)), message["shards"])

    def serve(self, start: bytes, *servers: Any) -> Iterator[News]:
        """Start the worker, and yield its news until it has ended; the last says how.

        Args:
            start: the fields of a script, the folder that travelled with it, if one did, the
                worker's intra-op threads, and where the coordinator is.
            servers: actors that gradients are pushed to; none: to the coordinator.
        """
        told = unpack(start)
        self._pushed = GradientPusher(servers, self._alarm.ring) if servers else None
        self._servers = len(servers)
        script = there = Script(**told["script"])
        if told["folder"] is not None:  # Ray has put its copy into this process's folder
            script = there.within(Path(told["folder"]), Path.cwd())
        here = ray.get_runtime_context().get_node_id()
        facts = {"host": this_host.name(), "mark": this_host.mark(), "node": here}
        yield self._news({"kind": "hello", "same": same_everywhere(there, script), **facts})
        kills = oom_kills()
        try:
            starter = SpawnStarter(script, spins=told["threads"] <= usable_cores())
            process = WorkerProcess(self._number, script, starter)
        except OSError as error:
            yield self._news({"kind": "ended", **Ending(1, str(error))._asdict()})
            return
        try:
            process.watch(self._selector, _nothing, _nothing)
            near = (told["node"], told["mark"]) == (here, facts["mark"])
            near = near and self._handed_over(process, told["door"], told["key"])
            yield self._news({"kind": "started", "pid": process.pid, "near": near})
            while not process.has_ended():
                if os.getppid() != self._raylet:
                    os._exit(1)  # Ray on this node is gone; it may take this process seconds to see
                for key, _ in self._selector.select(RANK_POLL_S):
                    key.data()
                if not near:
                    yield from self._round(process)
                yield from self._leaving()
            if not near:
                yield from self._round(process)  # what it sent before it ended counts
            ending = process.ending().explained(kills)
            yield self._news({"kind": "ended", **ending._asdict()})
        finally:
            process.close()

    def _handed_over(self, process: WorkerProcess, door: str | None, key: str) -> bool:
        """Hand the worker over to a coordinator on this node; return whether."""
        if door is None or process.exit is None or process.line.has_unsent:
            return False
        if not hand_over(door, key, process.line, process.exit):
            return False
        process.deaf()
        process.line.close()  # it has to be cut when the coordinator ends
        return True

    def _round(self, process: WorkerProcess) -> Iterator[News]:
        """Pass on what has come, in both directions."""
        process.flush()
        for message in process.arrived():
            if "memory" in message:  # of outputs, which another host cannot map
                message["memory"] = message["memory"].map[:]
            yield from self._passed_on(process, message)
        if process.is_cut and not self._is_cut:
            self._is_cut = True
            process.deaf()
            yield self._news({"kind": "cut"})
        while self._taken in self._told:
            self._take(process, self._told.pop(self._taken))
            self._taken += 1
        yield from self._ordered(process)
        for message, rest in () if self._pushed is None else self._pushed.arrived():
            yield self._news(message, has_image=True)
            yield rest
        if time.monotonic() - self._told_at > RANK_POLL_S and self._computing is not None:
            yield self._news(None)

    def _leaving(self) -> Iterator[News]:
        """Tell once that this actor was asked to end."""
        if self._is_to_leave and not self._has_said_so:
            self._has_said_so = True
            yield self._news({"kind": "leaves"})

    def _passed_on(self, process: WorkerProcess, message: Message) -> Iterator[News]:
        """Yield what a message of the worker's is for the coordinator."""
        if message["kind"] not in ANSWERS or self._computing is None:
            yield self._news(message)
            return
        (order, slot), self._computing = self._computing, None
        guess = self._guess
        if guess is None or guess.ticket != message["ticket"]:
            yield from self._answered(process, message, order, slot)
        elif guess.is_wrong:
            self._guess = None
        else:
            guess.answer = message
            yield from self._replied(process, guess)

    def _ordered(self, process: WorkerProcess) -> Iterator[News]:
        """Carry out what was ordered, as far as the worker is free for it."""
        while self._orders:
            order, images = self._orders[0]
            guess = self._guess
            if guess is not None and guess.ordered is None and not guess.is_wrong:
                if guess.is_for(order):
                    guess.ordered = order
                    self._orders.popleft()
                    if order["ticket"] == self._cancelled:
                        self._cancel(order["ticket"])
                    yield from self._replied(process, guess)
                    continue
                if guess.answer is not None:
                    self._guess = None
                else:
                    guess.is_wrong = True
                    self._cancel(guess.ticket)
            if self._computing is not None:
                return
            self._orders.popleft()
            self._carry_out(process, order, images)

    def _replied(self, process: WorkerProcess, guess: SpeculativeShard) -> Iterator[News]:
        """Yield the answer to an order that was guessed, once both are there."""
        reply = guess.reply()
        if reply is not None:
            assert guess.ordered is not None
            self._guess = None
            yield from self._answered(process, reply, guess.ordered, guess.slot)

    def _answered(
        self, process: WorkerProcess, answer: Message, order: Message, slot: int
    ) -> Iterator[News]:
        """Yield the answer to an order, while the worker goes on with what is likely to follow."""
        following = guessed(order) if answer["kind"] == "done" and not self._orders else None
        if following is not None:
            self._guess = SpeculativeShard(following, self._give(process, following))
        has_result = answer["kind"] == "done" and order["slot"] is not None
        if has_result and self._pushed is not None:
            assert self._arena is not None
            assert self._slicing is not None
            gradient, rest = (
                self._arena.slot(slot).flat,
                image_of(self._arena, ArenaPart.REST, slot),
            )
            self._pushed.push(answer, order["step"], gradient, self._slicing, rest)
            return
        yield self._news(answer, has_image=has_result)
        if has_result:
            # Ray copies the image before it asks for the next piece of news.
            yield self._image_of_result(slot)

    def _take(self, process: WorkerProcess, order: Order) -> None:
        """Take the next order; some are for now, the others for when the worker has answered."""
        message, _ = order
        match message["kind"]:
            case "cancel":
                self._cancel(message["ticket"])
            case "end":
                process.post(message)
            case _:
                self._orders.append(order)

    def _carry_out(
        self, process: WorkerProcess, message: Message, images: tuple[Image, ...]
    ) -> None:
        """Pass an order on to the worker; it reads nothing meanwhile that the images go to."""
        given = self._given(message.pop("images", ()), images)
        if message["kind"] == "arena":
            self._arena = arena_like(message)
            if self._servers:
                self._slicing = Slicing(self._arena.parameters.layout, self._servers)
        arena = self._arena
        assert arena is not None
        fds: list[int] = []
        owned: list[Segment] = []  # until they are sent
        slices = itertools.count()
        for part, image in given:
            if part == ArenaPart.SLICES:
                assert self._slicing is not None
                self._slicing.put(arena.parameters, next(slices), image)
            elif part in (ArenaPart.SHARED, ArenaPart.START):  # in the order of their descriptors
                owned.append(Segment(image.nbytes))
                owned[-1].array(image.nbytes)[:] = image
                fds.append(owned[-1].fd)
            else:
                slot = arena.snapshots[0] if part == ArenaPart.SNAPSHOT else None
                image_of(arena, part, slot)[:] = image
        if message["kind"] == "arena":
            message["description"], fds = arena.handed_over()
        elif message["kind"] == "compute":
            self._give(process, message, *fds)
            if message["ticket"] == self._cancelled:
                self._cancel(message["ticket"])
            return
        process.post(message, *fds)

    def _given(self, parts: Sequence[str], images: Sequence[Image]) -> list[tuple[str, Image]]:
        """Return which part each image is of: of slices there is one for each server."""
        each = [
            p for part in parts for p in [part] * (self._servers if part == ArenaPart.SLICES else 1)
        ]
        return [*zip(each, images, strict=True)]

    def _give(self, process: WorkerProcess, order: Message, *fds: int) -> int:
        """Have the worker compute a shard; return the slot that the result is written to."""
        assert self._arena is not None
        self._slot = 1 - self._slot
        self._computing = (order, self._slot)
        snapshot = order["snapshot"] and [self._arena.snapshots[0], order["snapshot"][1]]
        slot = None if order["slot"] is None else self._slot
        process.post({**order, "slot": slot, "snapshot": snapshot}, *fds)
        return self._slot

    def _cancel(self, ticket: int) -> None:
        """Let the worker leave off a shard that it computes, or will be given."""
        guess = self._guess
        if guess is not None and guess.ordered is not None and guess.ordered["ticket"] == ticket:
            ticket = guess.ticket
        elif ticket >= 0:
            self._cancelled = ticket
        if self._arena is not None:
            self._arena.cancelled[self._number] = ticket

    def _image_of_result(self, slot: int) -> Image:
        assert self._arena is not None
        return image_of(self._arena, ArenaPart.RESULT, slot)

    def _news(self, message: Message | None, *, has_image: bool = False) -> bytes:
        """Return a piece of news: a message of the worker's, and what it is at."""
        self._told_at = time.monotonic()
        news: dict[str, Any] = {"message": message, "doing": None, "ahead": None}
        news["has_image"] = has_image
        if self._arena is not None:
            doing = self._arena.sheets[self._number].read()
            age_s = time.monotonic() - doing.since  # clocks of two hosts have nothing in common
            news["doing"] = doing._replace(since=age_s)
            news["ahead"] = self._arena.loaded_ahead(self._number)
        return pack(news)


class WorkerActorOfRay(WorkerActor):
    """An agent as an actor. Ray makes it in the main thread, where its signals are taken."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        signal.signal(signal.SIGTERM, self.be_asked_to_end)  # Ray's own would end it at once


def _nothing() -> None:
    """Its wire and its end only wake the agent, which then looks at everything."""
