"""The pool of workers of a Ray cluster: a lease each, wherever Ray has room for the worker.

A lease is an actor. The process of a worker is here, or behind the relay of a further node: the
actor that has the node's shared memory (``relay_actor.py``). Values are put into Ray's object store
once for all nodes, and travel to a node once, whichever of its workers needs the values first. A
result, or the sum of results of several workers, is copied into a slot that the coordinator has
lent to the worker.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from selectors import BaseSelector
from typing import Any

import ray
from ray.exceptions import RayError

from quorate.engines.messages import pack
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import Arena, ArenaPart
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import Callback, ElasticSize, LocalPool, WorkerHandle
from quorate.engines.processes.script import Script
from quorate.engines.ray.cluster import joined_cluster
from quorate.engines.ray.cluster_life import ClusterNotices, Ref, actor_on
from quorate.engines.ray.demand import demanded
from quorate.engines.ray.node_facts import difference, same_everywhere
from quorate.engines.ray.relay_actor import NEWS, ORDERS, RelayActor
from quorate.engines.ray.servers import RayServers
from quorate.engines.ray.worker_lease import LIFE, PLACE, WorkerLease
from quorate.engines.servers import Image
from quorate.engines.workers import Workers
from quorate.errors import SettingError, UserError
from quorate.machine import this_host
from quorate.machine.limits import KILLED_EXIT_S, STAGE_POLL_S, WORKER_SILENCE_S
from quorate.machine.regular_file import is_folder
from quorate.machine.shared_memory import Segment
from quorate.replica.sparse.found import no_rows

Images = dict[messages.Part, list[Ref]]


class RayWorkerHandle(WorkerHandle):
    """The coordinator's end of a worker: the lease, and a process here or behind a relay.

    All state belongs to the coordinator's thread: further threads have actions carried out there.

    Args:
        number: of the worker.
        life: names this process of the worker in messages to a relay.
        pool: the pool of the worker.
    """

    def __init__(self, number: int, life: int, pool: RayPool) -> None:
        super().__init__(number)
        self.is_placed = False
        self.life = life
        self.node_id = ""
        self.where = ""  # the node, for people
        self._pool = pool
        self._pid: int | None = None
        self._leaves = self._is_closed = False
        self._ending: Ending | None = None
        self._lost: tuple[float, Ending] | None = None  # since when there is no lease
        self._inbox: list[messages.WorkerMessage] = []
        self._watch: tuple[BaseSelector, Callback, Callback] | None = None
        self._relay: NodeRelay | None = None  # on a further node
        lease = self._lease = pool.lease.remote(number)
        # Held: a future that nobody holds is never called.
        self._futures = [
            self._when(lease.place.options(concurrency_group=PLACE).remote(), self._meet),
            self._when(
                lease.live.options(concurrency_group=LIFE).remote(),
                lambda _: self.leave("because its actor was asked to end"),
            ),
        ]

    @property
    def pid(self) -> int | None:
        """The id of a process of this host; else None."""
        if self.line is not None:
            return super().pid
        return self._pid if self.host is None else None

    def watch(self, selector: BaseSelector, hear: Callback, look: Callback) -> None:
        """Call ``hear`` and ``look`` after each action; have a selector watch a process here."""
        self._watch = selector, hear, look

    def call(self, action: Callback) -> None:
        """Have the coordinator's thread carry out an action. Thread-safe."""
        self._pool.actions.append(partial(self.carry_out, action))
        self._pool.wake()

    def carry_out(self, action: Callback) -> None:
        """Carry out an action, unless the handle is closed, and look at the consequences."""
        if not self._is_closed:
            action()
            assert self._watch is not None
            for look in self._watch[1:]:
                look()

    def arrived(self) -> list[messages.WorkerMessage]:
        """Return all arrived messages. Does not block."""
        arrived, self._inbox = [*self._inbox, *super().arrived()], []
        with_error = messages.ScriptRaised | messages.ShardFailed | messages.JobReady
        for message in arrived:
            if isinstance(message, with_error) and message.error is not None:
                message.error.add_note(f"quorate: worker {self.number} is on {self.where}")
        return arrived

    def has_ended(self) -> bool:
        """Return whether the worker is gone, and all messages have arrived. Does not block."""
        if self.line is not None:  # until its end it writes to the coordinator's memory
            return super().has_ended()
        return self._ending is not None

    def wait(self, timeout_s: float) -> bool:
        """Return whether the worker ends in time. Blocks for a process of this node alone."""
        return self.has_ended() if self.line is None else super().wait(timeout_s)

    def kill(self) -> None:
        """End the worker's process and its lease. Does not block."""
        if self.line is not None:
            super().kill()
        elif self._relay is not None:
            self._relay.post(self, messages.KillProcess())
        self._pool.node.kill(self._lease)

    def ending(self) -> Ending:
        """Return how the worker ended, after the end."""
        if self.line is not None:
            self.end(super().ending())
        assert self._ending is not None
        return self._ending

    def close(self) -> None:
        """End the worker, and wait until the worker writes to the coordinator's memory no more."""
        self._is_closed = True
        self.kill()
        if self.line is not None:
            super().close()
        if self._relay is not None:
            self._relay.forget(self)

    def post(self, message: messages.WorkerMessage, *fds: int) -> None:
        """Send a message, with images of the memory concerned. Does not block for long."""
        if self._relay is not None:
            self._relay.post(self, message, *fds)
        elif self.line is not None:
            super().post(message, *fds)

    def cancel(self, ticket: int) -> None:
        """Report a cancelled shard, if the worker does not see the coordinator's arena."""
        if self._relay is not None:
            self._relay.post(self, messages.CancelShards(ticket))

    # --- what happens on the node: in the coordinator's thread ------------------------------------

    def leave(self, why: str) -> None:
        """Report once that the worker has to go.

        Args:
            why: a fact about the node or actor: "because Ray drains the node".
        """
        if not self._leaves:
            self._leaves = True
            self._inbox.append(messages.WorkerLeaves(f"has left {self.where}, {why}"))

    def refuse(self, differs: str) -> None:
        """Report a node that would compute something else."""
        fix = "every node needs the same, at the same path"
        self._inbox.append(messages.ScriptRefused(f"cannot use {self.where}: {differs}; {fix}"))
        self.kill()

    def take(self, message: messages.WorkerMessage) -> None:
        """Take a message of the worker from a relay."""
        match message:
            case messages.WorkerForked():
                self._pid = message.pid
            case messages.WireCut():
                self._is_cut = True
            case messages.WorkerEnded():
                self.end(message.ending)
            case _:
                self._inbox.append(message)

    def end(self, ending: Ending) -> None:
        """Note the end of the worker; a lost lease explains the end."""
        if self._ending is None:
            known = ending if self._lost is None else self._lost[1]
            self._ending = known._replace(node=self.where)

    def lose(self, ending: Ending) -> None:
        """Note the end of the lease, and end the process of the worker."""
        if self._lost is not None or self._ending is not None:
            return
        self._lost = time.monotonic(), ending
        self.kill()
        if self._relay is None:
            self.end(ending)

    def lose_all(self, ending: Ending) -> None:
        """Note the end of the cluster: no relay will report anything any more."""
        self.lose(ending)
        self.end(ending)

    def lose_relay_if_silent(self) -> None:
        """Give up a relay that does not report the end of a worker without a lease. Thread-safe."""
        if self._lost is None or self._ending is not None or self._relay is None:
            return
        if time.monotonic() - self._lost[0] > WORKER_SILENCE_S:
            self._relay.kill()

    def _when(self, ref: Any, then: Callable[[Any], None]) -> Future[Any]:
        """Have the coordinator's thread pass on a value of the lease, or an error."""

        def arrived(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                self.call(partial(then, future.result()))
            else:
                self.call(partial(self.lose, self._pool.node.ending_of(error, "its actor")))

        future: Future[Any] = ref.future()
        future.add_done_callback(arrived)
        return future

    def _meet(self, place: dict[str, Any]) -> None:
        """Start the worker's process where Ray has placed the lease."""
        self.node_id = place["node"]
        self.where = f"{place['host']} (node {place['node'][:8]})"
        self.host = None if place["mark"] == this_host.mark() else place["host"]
        self._inbox.append(messages.WorkerPlaced())
        if not self._pool.is_own(place["node"], place["mark"]):
            self.place = self.node_id
            self._relay = self._pool.relay(self.node_id)
            self._relay.start(self, place["environment"])
            return
        assert self._watch is not None
        try:
            self.begin(self._pool.local, environment=place["environment"])
        except OSError as error:
            self.end(Ending(1, str(error)))
            return
        super().watch(*self._watch)


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
        self._sent: dict[messages.Part, tuple[ArenaPart, int]] = {}  # with versions
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
        self.post(worker, messages.StartProcess(worker.number, dict(environment)))

    def post(self, worker: RayWorkerHandle, message: messages.WorkerMessage, *fds: int) -> None:
        """Send a worker a message, with images of values that the node lacks."""
        images, descriptors, pool = Images(), list(fds), self._pool
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
            self._tell.remote(
                number, worker.life, pack(messages.RelayOrder(message, parts)), *values
            )

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

    def _add(self, images: Images, version: int, name: ArenaPart, slot: int | None = None) -> None:
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
                packed, image = self._pool.node.get(ref)
                self._hear(messages.NEWS_READER.unpack(packed), image)
                del ref, image  # frees the object in Ray's store before the wait for the next one
        except Exception as error:  # the edge of the thread
            ending = self._pool.node.ending_of(error, "its relay")
        self.kill()  # the actor may go on after an exception
        with self._lock:
            workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.call(partial(worker.end, ending))

    def _hear(self, news: messages.RelayNews, image: Any) -> None:
        message, arena = news.message, self._pool.arena
        if isinstance(message, messages.NodeFacts):
            self._require_same(message)
            return
        with self._lock:
            if news.life is None or (worker := self._workers.get(news.life)) is None:
                return
            if news.doing is not None:
                since = time.monotonic() - news.doing.since
                arena.sheets[worker.number].take(news.doing._replace(since=since))
                arena.loads_ahead(worker.number, news.ahead)
            if news.image is not None:
                arena.image(*news.image)[:] = image
        if message is not None:
            worker.call(partial(worker.take, message))

    def _require_same(self, facts: messages.NodeFacts) -> None:
        """Refuse a node that would compute something else; the next worker there gets a relay."""
        if (differs := difference(self._pool.same, facts.same)) is None:
            return
        self.is_lost = True
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.call(partial(worker.refuse, differs))


class RayPool:
    """The workers of a Ray cluster, an actor each. Needs ``close``.

    Args:
        script: the script to run.
        arena: the coordinator's.
        workers: the settings.
        wake: has the coordinator's thread call ``flush``. Any thread may call it.
        handler: the ``class_name`` of a ``SliceHandler``, if servers may own the parameters.

    Raises:
        UserError: there is no such cluster, or the cluster lacks resources.
        SettingError: the script is not in ``working_dir``, or gradients are by rows.
        ServerError: a server cannot be started.
    """

    takes_runs = False  # results travel one by one
    elastic: ElasticSize | None = None

    def __init__(
        self,
        script: Script,
        arena: Arena,
        workers: Workers,
        wake: Callable[[], None],
        handler: str | None,
    ) -> None:
        if by_rows := arena.parameters.layout.by_rows:  # a result is the image of a slot, no more
            raise no_rows("engine", "ray", min(by_rows))
        demand, folder = demanded(workers), folder_of(script, workers.working_dir)
        if demand.least is not None:
            room = f"the Ray cluster has room for {demand.text()} each"
            self.elastic = ElasticSize(demand.least, room)
        # As many versions of parameters as workers may read, and a result of each worker.
        store_bytes = (2 * demand.of_one_machine + 4) * arena.slot_bytes
        self.script = script
        self.folder = folder
        self.same = same_everywhere(script)
        self.arena = arena
        self.threads = workers.threads
        self.wake = wake
        self.actions: deque[Callback] = deque()  # for the next ``flush``
        self._lives = itertools.count()
        self._handles: dict[int, RayWorkerHandle] = {}  # the newest of each worker
        self._relays: dict[str, NodeRelay] = {}  # by node; the newest
        self.frozen = 0  # counts changes of frozen parameters
        # Values as objects. An older version is gone with its last reader.
        self._newest: dict[ArenaPart, tuple[int, list[Ref]]] = {}
        self.servers: RayServers | None = None
        with ExitStack() as opened:
            self.local = opened.enter_context(
                closing(LocalPool(script, 1, threads=workers.threads))
            )
            self.node = opened.enter_context(
                joined_cluster(workers.address, demand, store_bytes, folder)
            )
            self._own_id = ray.get_runtime_context().get_node_id()
            if workers.servers is not None and handler is not None:
                self.servers = RayServers(workers.servers, handler, self.node, wake)
                opened.callback(self.servers.close)
            opened.callback(self._close_relays)
            opened.callback(self._handles.clear)
            self._notices = ClusterNotices(lambda: list(self._handles.values()), self.node)
            opened.callback(self._notices.close)
            self._opened = opened.pop_all()
        self.lease = ray.remote(
            max_restarts=0,  # the supervisor decides whether a new actor takes its place
            scheduling_strategy="SPREAD",
            concurrency_groups={PLACE: 1, LIFE: 1},
            **demand.options(),
        )(WorkerLease)

    def start(self, number: int) -> RayWorkerHandle:
        """Request a worker, for when the cluster has room. Does not block.

        Raises:
            UserError: the cluster is gone.
        """
        if self._notices.gone is not None:
            raise UserError(self._notices.gone)
        handle = self._handles[number] = RayWorkerHandle(number, next(self._lives), self)
        return handle

    def is_own(self, node_id: str, mark: str) -> bool:
        """Return whether the coordinator is the relay: workers there share its memory."""
        is_here = node_id == self._own_id and mark == this_host.mark()
        return is_here and self.servers is None  # else workers compute from the servers' values

    def relay(self, node_id: str) -> NodeRelay:
        """Return the relay of a node, perhaps a new one. Does not block."""
        relay = self._relays.get(node_id)
        if relay is None or relay.is_lost:
            relay = self._relays[node_id] = NodeRelay(node_id, self)
        return relay

    @property
    def parameters(self) -> ArenaPart:
        """The part with the newest parameters: slices of the servers, or the coordinator's."""
        is_there = self.servers is not None and self.servers.have_newest
        return ArenaPart.SLICES if is_there else ArenaPart.PARAMETERS

    def refs(self, name: ArenaPart, version: int, image: Callable[[], Image]) -> list[Ref]:
        """Return the objects of values; a new version is put into the store first.

        Args:
            image: returns the bytes of the values, which do not change during the call.
        """
        if self.servers is not None and name == ArenaPart.SLICES:
            return self.servers.refs
        if (known := self._newest.get(name)) is None or known[0] != version:
            self._newest[name] = version, [self.node.put(image())]
        return self._newest[name][1]

    def _close_relays(self) -> None:
        for relay in self._relays.values():
            relay.close()

    def flush(self) -> None:
        """Carry out the actions of workers. Raise ServerError if a server is lost."""
        while self.actions:
            self.actions.popleft()()
        self.local.flush()
        if self.servers is not None:
            self.servers.require()

    def close(self) -> None:
        """End the servers, and leave the cluster."""
        self._opened.close()


def image_in(fd: int) -> Image:
    """Return the bytes of a segment, which stays the caller's."""
    segment = Segment(os.fstat(fd).st_size, os.dup(fd))
    return segment.array(segment.nbytes)


def folder_of(script: Script, working_dir: str | None) -> Path | None:
    """Return the folder to send to every node; None: every node has the script.

    Raises:
        SettingError: the script is not in the folder.
    """
    if working_dir is None:
        return None
    folder = Path(script.folder, working_dir).resolve()
    if not is_folder(folder) or not Path(script.path).resolve().is_relative_to(folder):
        expected = f"a folder that {script.path} is in"
        raise SettingError("working_dir", working_dir, expected, "name the script's own folder")
    return folder
