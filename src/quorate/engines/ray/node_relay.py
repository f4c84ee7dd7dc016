"""The coordinator's end of the relay of a node: sends orders with images, and takes news.

Values travel to a node once, whichever of its workers needs the values first. A result, or the sum
of results of several workers, is copied into a slot that the coordinator has lent to the worker.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from quorate.engines.messages import pack
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import ArenaPart
from quorate.engines.processes.endings import Ending
from quorate.engines.ray.cluster_life import actor_on
from quorate.engines.ray.images import (
    NEWS_READER,
    NodeFacts,
    Ordered,
    Part,
    Ref,
    RelayNews,
    RelayOrder,
    StartProcess,
    difference,
)
from quorate.engines.ray.relay_actor import NEWS, ORDERS, RelayActor
from quorate.engines.servers import Image
from quorate.machine.limits import KILLED_EXIT_S, STAGE_POLL_S
from quorate.machine.shared_memory import Segment

if TYPE_CHECKING:
    from quorate.engines.ray.pool import RayPool, RayWorkerHandle


class NodeRelay:
    """The coordinator's end of the relay of one node. Needs ``close``.

    A thread listens to the actor. The rest belongs to the coordinator's thread.

    Args:
        node_id: of the node.
        pool: the pool of the workers.
    """

    def __init__(self, node_id: str, pool: RayPool) -> None:
        self.is_lost = False
        self._pool = pool
        self._ordered = 0
        self._workers: dict[int, RayWorkerHandle] = {}  # by life
        # Held while a result is copied: afterwards the slot may be lent to another worker.
        self._lock = threading.Lock()
        self._sent: dict[Part, tuple[ArenaPart, int]] = {}  # with versions
        self._averaged: set[int] = set()  # jobs that are computed from averaged parameters
        servers = () if pool.servers is None else pool.servers.actors
        folder = None if pool.folder is None else str(pool.folder)
        kind = actor_on(node_id, RelayActor, NEWS, ORDERS)
        actor = self._actor = kind.remote(vars(pool.script), folder, pool.threads, *servers)
        self._tell = actor.tell.options(concurrency_group=ORDERS)
        news = actor.serve.options(num_returns="streaming", concurrency_group=NEWS).remote()
        self._listener = threading.Thread(
            target=self._listen, args=(news,), name="quorate-listens-to-a-relay", daemon=True
        )
        self._listener.start()

    def start(self, worker: RayWorkerHandle, environment: Mapping[str, str]) -> None:
        """Have the relay start a worker's process in an environment."""
        with self._lock:
            self._workers[worker.life] = worker
        self.post(worker, StartProcess(worker.number, dict(environment)))

    def post(self, worker: RayWorkerHandle, message: Ordered, *fds: int) -> None:
        """Send a worker a message, with images of values that the node lacks."""
        images, descriptors, pool = dict[Part, list[Ref]](), list(fds), self._pool
        if isinstance(message, messages.ModelRequest):
            if message.model_changes is not None:
                pool.frozen = message.model_changes["frozen"]
                self._add(images, pool.frozen, ArenaPart.FROZEN)
            if message.shared is not None and message.shared["tensors"] is not None:
                version, image = message.shared["stored"], partial(image_in, descriptors.pop(0))
                images[ArenaPart.SHARED, None] = pool.refs(ArenaPart.SHARED, version, image)
        match message:
            case messages.ShareMemory():
                self._add(images, pool.frozen, ArenaPart.FROZEN)
            case messages.OpenJob():
                if message.averaged:
                    self._averaged.add(message.job)
                if descriptors:
                    images[ArenaPart.START, None] = [pool.node.put(image_in(descriptors[0]))]
            case messages.ComputeShards(snapshot=(slot, version)):
                served = (ArenaPart.SLICES, ArenaPart.REST)  # REST: buffers, which are here
                for part in (ArenaPart.SNAPSHOT,) if pool.servers is None else served:
                    self._add(images, version, part, slot)
            case messages.ComputeShards():
                is_averaged = message.job in self._averaged
                parameters = ArenaPart.AVERAGE if is_averaged else pool.parameters
                for part in (parameters, ArenaPart.BUFFERS):
                    self._add(images, pool.arena.published, part)
        parts = [part for part, refs in images.items() for _ in refs]
        values = [ref for refs in images.values() for ref in refs]
        number, self._ordered = self._ordered, self._ordered + 1
        with suppress(RayError):  # the actor is gone, and the listener says so
            self._tell.remote(number, worker.life, pack(RelayOrder(message, parts)), *values)

    def forget(self, worker: RayWorkerHandle) -> None:
        """Pass on no more news of a worker, and copy no more results."""
        with self._lock:
            self._workers.pop(worker.life, None)

    def kill(self) -> None:
        """End the actor, and so all workers of the relay. Does not block. Thread-safe."""
        self.is_lost = True
        self._pool.node.kill(self._actor)

    def close(self) -> None:
        """End the actor, and wait until nothing more can come."""
        # After this nobody may call Ray for it: once it is shut down, a call would start another,
        # and Ray ends a process in which a thread waits for Ray then.
        self.kill()
        self._listener.join(KILLED_EXIT_S)

    def _add(
        self, images: dict[Part, list[Ref]], version: int, name: ArenaPart, slot: int | None = None
    ) -> None:
        """Add the images of a part of the arena, unless the node has this version."""
        # Slices and whole parameters overwrite each other.
        key = ArenaPart.PARAMETERS if name == ArenaPart.SLICES else name, slot
        if self._sent.get(key) != (name, version):
            self._sent[key] = name, version
            image = partial(self._pool.arena.image, name, slot)
            images[name, slot] = self._pool.refs(name, version, image)

    # --- what comes: in the listener's thread -----------------------------------------------------

    def _listen(self, news: Any) -> None:
        ending = Ending(1, "its relay ended without a word")
        try:
            while not self.is_lost:
                if not ray.wait([news], timeout=STAGE_POLL_S, fetch_local=False)[0]:
                    self._pool.node.require()
                    continue
                if (ref := next(news, None)) is None:
                    break
                told = NEWS_READER.unpack(self._pool.node.get(ref))
                image = next(news) if told.image is not None else None
                self._hear(told, image)
                del ref, image  # the object: its memory is for the next one
        except Exception as error:  # the edge of the thread
            ending = self._pool.node.ending_of(error, "its relay")
        self.kill()  # the actor may go on after an exception
        with self._lock:
            workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.call(partial(worker.end, ending))

    def _hear(self, news: RelayNews, image: Ref | None) -> None:
        message, arena = news.message, self._pool.arena
        if isinstance(message, NodeFacts):
            self._require_same(message)
            return
        values: Any = None if image is None else self._pool.node.get(image)
        with self._lock:
            if news.life is None or (worker := self._workers.get(news.life)) is None:
                return
            if news.doing is not None:
                since = time.monotonic() - news.doing.since
                arena.sheets[worker.number].take(news.doing._replace(since=since))
                arena.loads_ahead(worker.number, news.ahead)
            if news.image is not None:
                self._copy(values, *news.image)
        if message is not None:
            worker.call(partial(worker.take, message))

    def _require_same(self, facts: NodeFacts) -> None:
        """Refuse a node that would compute something else; the next worker there gets a relay."""
        if (differs := difference(self._pool.same, facts.same)) is None:
            return
        self.is_lost = True
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.call(partial(worker.refuse, differs))

    def _copy(self, values: Any, part: ArenaPart, slot: int | None) -> None:
        self._pool.arena.image(part, slot)[:] = values


def image_in(fd: int) -> Image:
    """Return the bytes of a segment, which stays the caller's."""
    segment = Segment(os.fstat(fd).st_size, os.dup(fd))
    return segment.array(segment.nbytes)
