"""A relay: an actor with the shared memory of a node, on behalf of all workers of the node.

The relay starts the workers of its node, as the coordinator starts the workers of its own: a fork
server imports torch once, and the script in a worker has a main thread and no threads of Ray's, so
that it may fork. Relay and workers share memory as a coordinator and its workers do, and copies
travel: parameters with the first order that needs them, results with an answer, or added up.

Between a worker's answer and its next order lies a round trip, and the result travels before. So a
relay has a worker begin the shard that is likely to follow, with the same parameters, at once. If
the next order is for this speculative shard, the shard is under way by then, or done. If not, the
shard is cancelled without an answer to the coordinator.

Results of a node's workers for one step are added before the results leave (``node_sums.py``).
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import structs

from quorate.engines.messages import pack
from quorate.engines.partition import Partition
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import Arena, ArenaDescription, ArenaPart
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import LocalPool, WorkerHandle
from quorate.engines.processes.script import Script
from quorate.engines.processes.wire import Alarm
from quorate.engines.ray.node_facts import same_everywhere
from quorate.engines.ray.node_sums import NodeSums, WorkerResult, add_up
from quorate.engines.ray.servers import GradientPusher
from quorate.engines.servers import Image, read_image
from quorate.machine import this_host
from quorate.machine.limits import RANK_POLL_S
from quorate.machine.resources import oom_kills
from quorate.machine.shared_memory import Segment

NEWS, ORDERS = "news", "orders"  # threads of a relay

Order = tuple[int, messages.RelayOrder, tuple[Image, ...]]


@dataclass
class GivenShard:
    """A shard that a worker computes, or has computed before an order of the coordinator."""

    given: messages.ComputeShards  # the order as the worker has it
    slot: int | None  # of the result; None: the result has no vectors
    order: messages.ComputeShards | None  # the coordinator's; None: the shard is speculative
    answer: messages.Answer | None = None  # the worker's, once there
    ordered_at: float = field(default_factory=time.monotonic)

    def adopts(self, order: messages.ComputeShards) -> bool:
        """Take an order for this speculative shard, from the node's values; else return False."""
        if order.model_changes is not None or order.shared is not None:
            return False
        same = ("job", "step", "shard", "rank_of")
        if any(getattr(order, name) != getattr(self.given, name) for name in same):
            return False
        self.order, self.ordered_at = order, time.monotonic()
        return True


class RelayedWorker:
    """A worker process, from the start to the exit. Passes on messages in both directions.

    Args:
        life: names the process.
        process: the process.
        relay: the relay of the node.
    """

    def __init__(self, life: int, process: WorkerHandle, relay: RelayActor) -> None:
        self.life = life
        self.process = process
        self.told_at = 0.0  # when the newest news was told
        self._relay = relay
        # By ticket, until the coordinator has the answer: ordered shards, and a speculative one
        # without an order yet. Answers to other tickets are dropped.
        self._shards: dict[int, GivenShard] = {}
        self._slot = 0  # which of the worker's two slots has the newest result
        self._is_forked = self._is_cut = False
        self._oom_kills = oom_kills()

    def pass_on(self) -> bool:
        """Pass on all that has come, in both directions; return False after the end."""
        process = self.process
        has_ended = process.has_ended()  # messages sent before the end count
        process.flush()
        if process.pid is not None and not self._is_forked:
            self._is_forked = True
            self._relay.say(self, messages.WorkerForked(process.pid))
        for message in process.arrived():
            if isinstance(message, messages.ShardsDone) and message.memory is not None:
                message.memory = message.memory.map[:]  # another host cannot map it
            self._take_message(message)
        if process.is_cut and not self._is_cut:
            self._is_cut = True
            self._relay.say(self, messages.WireCut())
        if has_ended:
            ending = process.ending().explained(self._oom_kills)
            self.close()
            self._relay.say(self, messages.WorkerEnded(ending))
            return False
        computes = any(shard.answer is None for shard in self._shards.values())
        if computes and time.monotonic() - self.told_at > RANK_POLL_S:
            self._relay.say(self, None)
        return True

    def close(self) -> None:
        """End the process. Results of the worker are passed on, and no sibling waits for more."""
        self._shards.clear()
        self._relay.sums.hurry(self)
        self._relay.pass_on_sums()
        self.process.close()

    def take_order(self, message: messages.WorkerMessage, segments: list[Segment]) -> None:
        """Carry out an order, or pass the order on: the worker carries out orders one by one."""
        speculative = self._speculative
        match message:
            case messages.CancelShards(ticket):
                for shard in self._shards.values():
                    if shard.order is not None and shard.order.ticket == ticket:
                        self._cancel(shard)
            case messages.KillProcess():
                self.process.kill()
            case messages.ComputeShards() if speculative and speculative.adopts(message):
                self._answer(speculative)
            case _:
                self.doubt()
                for order in self.unanswered:  # this order is next: no speculative shard before
                    order.following = None
                if isinstance(message, messages.ComputeShards):
                    self._give(message, message, segments)
                else:
                    self._relay.send(self, message, segments)

    @property
    def unanswered(self) -> list[messages.ComputeShards]:
        """The coordinator's orders for shards that are not answered yet."""
        return [shard.order for shard in self._shards.values() if shard.order is not None]

    @property
    def _speculative(self) -> GivenShard | None:
        return next((shard for shard in self._shards.values() if shard.order is None), None)

    def doubt(self) -> None:
        """Give up a speculative shard: values of the node have changed."""
        if (shard := self._speculative) is not None:
            del self._shards[shard.given.ticket]
            if shard.answer is None:
                self._cancel(shard)

    def _cancel(self, shard: GivenShard) -> None:
        arena, ticket = self._relay.arena, shard.given.ticket
        # An abandoned shard may be under way while the cancelled one waits for its turn.
        tickets = arena.abandoned if ticket < -1 else arena.cancelled
        tickets[self.process.number] = ticket

    def _give(
        self,
        given: messages.ComputeShards,
        order: messages.ComputeShards | None,
        segments: list[Segment],
    ) -> None:
        """Have the worker compute a shard, ordered by the coordinator or speculative."""
        slot = None
        if given.slots != [None]:  # the result of the shard before may wait in the other slot
            self._slot = 1 - self._slot
            slot = 2 * self.process.number + self._slot
        self._shards[given.ticket] = GivenShard(given, slot, order)
        self._relay.send(self, structs.replace(given, slots=[slot]), segments)

    # --- answers of the worker --------------------------------------------------------------------

    def _take_message(self, message: messages.WorkerMessage) -> None:
        """Take a message of the worker: the answer to a speculative shard may have to wait."""
        if not isinstance(message, messages.Answer):
            self._relay.say(self, message)
        elif (shard := self._shards.get(message.ticket)) is not None:
            shard.answer = message
            self._answer(shard)

    def _answer(self, shard: GivenShard) -> None:
        """Answer the coordinator, once order and answer are there; the worker goes on at once."""
        order, answer = shard.order, shard.answer
        if order is None or answer is None:
            return
        del self._shards[shard.given.ticket]
        answer.ticket = order.ticket
        if not isinstance(answer, messages.ShardsDone):
            self._relay.say(self, answer)
            return
        if order.following is not None:
            step, first = order.following
            own = {"ticket": -2 - order.ticket, "step": step, "shard": first}
            following = structs.replace(order, **own, model_changes=None, shared=None)
            self._give(following, None, [])
        if shard.slot is None or any(each.awaits_totals for each in answer.results):
            self._relay.say(self, answer)
            return
        computed_s = time.monotonic() - shard.ordered_at
        self._relay.take(WorkerResult(self, order, answer, shard.slot, computed_s))


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
        self._news: deque[tuple[bytes, Image | None]] = deque()
        self._workers: dict[int, RelayedWorker] = {}  # by life
        self._description: tuple[ArenaDescription, list[int]] | None = None
        self.sums = NodeSums(
            lambda: (order for worker in self._workers.values() for order in worker.unanswered)
        )
        # Ray's own handler ends the process at once, but workers first hand over, when their own
        # actors are asked to end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def __repr__(self) -> str:
        """Return the text that Ray writes before each line that a worker prints."""
        return f"quorate workers of {this_host.name()}"

    def tell(self, number: int, life: int, message: bytes, *images: Image) -> None:
        """Take an order. Orders are carried out by number: calls may overtake each other."""
        self._told[number] = life, messages.ORDER_READER.unpack(message), images
        self._alarm.ring()

    def serve(self) -> Iterator[tuple[bytes, Image | None]]:
        """Yield facts about the node, then the news of all workers, with images."""
        self._say(messages.RelayNews(None, messages.NodeFacts(self._same)))
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
        elif not self.sums.put(result):
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

    def _take_order(self, life: int, order: messages.RelayOrder, images: tuple[Image, ...]) -> None:
        message = order.message
        if isinstance(message, messages.StartProcess):
            self._start(life, message)
            return
        if isinstance(message, messages.ShareMemory) and self._description is None:
            self._make_arena(message.description)
        owned = self._write(order.parts, images)
        if (worker := self._workers.get(life)) is not None:  # else the coordinator hears of its end
            worker.take_order(message, owned)

    def _start(self, life: int, start: messages.StartProcess) -> None:
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
            self._say(messages.RelayNews(life, messages.WorkerEnded(Ending(1, str(error)))))
            return
        if self._description is not None:
            self.arena.sheets[number].tell("starting")  # not the phase of an earlier process
        process.watch(self._selector, _look_at_everything, _look_at_everything)
        self._workers[life] = RelayedWorker(life, process, self)

    def _make_arena(self, description: ArenaDescription) -> None:
        """Make an arena like the coordinator's; the results of each worker take two slots."""
        self.arena = Arena.like(description)
        self._description = self.arena.handed_over()

    @cached_property
    def _slicing(self) -> Partition:
        return Partition.among(self.arena.parameters.layout, self._servers)

    def _write(self, parts: list[messages.Part], images: tuple[Image, ...]) -> list[Segment]:
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
            self.arena.loads_ahead(worker.process.number, None)  # an earlier worker may have loaded
        worker.process.post(message, *fds)

    # --- news for the coordinator -----------------------------------------------------------------

    def say(
        self,
        worker: RelayedWorker,
        message: messages.WorkerMessage | None,
        image: tuple[ArenaPart, int | None, Image] | None = None,
    ) -> None:
        """Add a message of a worker to the news, with the worker's status, and perhaps an image.

        Args:
            image: with its part of a slot of the coordinator's arena.
        """
        worker.told_at = time.monotonic()
        news = messages.RelayNews(worker.life, message)
        if self._description is not None:
            doing = self.arena.sheets[worker.process.number].read()
            news.doing = doing._replace(since=time.monotonic() - doing.since)
            news.ahead = self.arena.loaded_ahead(worker.process.number)
        if image is not None:
            news.image = image[:2]
        self._say(news, None if image is None else image[2])

    def _say(self, news: messages.RelayNews, image: Image | None = None) -> None:
        self._news.append((pack(news), image))


def _look_at_everything() -> None:
    """Do nothing: each message, and the end of a worker, only wakes the relay."""
