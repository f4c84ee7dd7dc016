"""The coordinator's handle of a worker of a Ray cluster."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from selectors import BaseSelector
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from quorate.engines.messages import pack
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.alarm import Alarm
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import Callback, WorkerHandle
from quorate.engines.ray.handover import LocalConnection
from quorate.engines.ray.images import (
    NEWS_READER,
    ActorHello,
    ActorLeaves,
    ActorMessage,
    ActorStart,
    ActorStarted,
    ArenaPart,
    Ref,
    WorkerCut,
    WorkerEnded,
    difference,
    image_of,
)
from quorate.engines.ray.parameter_store import SentVersions, image_in
from quorate.engines.ray.shard_orders import OpenJob, ShardOrder
from quorate.engines.worker_status import Doing
from quorate.errors import UserError, cut
from quorate.machine import this_host
from quorate.machine.limits import EXIT_REPORT_S, KILLED_EXIT_S, STAGE_POLL_S

if TYPE_CHECKING:
    from quorate.engines.ray.pool import RayPool

NEWS, ORDERS, SUMS = "news", "orders", "sums"  # threads of an actor

M = TypeVar("M")

MOST_SAID = 600  # characters of Ray's text about an actor that cannot be started


class RayWorkerHandle(WorkerHandle):
    """The coordinator's end of a worker's actor.

    A thread listens to the actor. The rest of the state belongs to the coordinator's thread.

    Args:
        number: of the worker.
        pool: the pool of the worker, with everything common to workers.
    """

    def __init__(self, number: int, pool: RayPool) -> None:
        super().__init__(number)
        self.is_placed = False
        self.node_id = ""
        self._pool = pool
        self._ordered = 0
        self._orders: dict[int, ShardOrder] = {}  # by ticket: of shards not answered yet
        self._jobs: dict[int, OpenJob] = {}
        self._sent = SentVersions(pool.store)
        self._frozen = 0  # the number of the newest values of frozen parameters asked for
        self._pid: int | None = None
        self._node = ""
        self._leaves = False
        self._ending: Ending | None = None
        # Answers, and images that go to a slot before they are passed on.
        self._inbox: deque[tuple[messages.Arrived, int | None, Any]] = deque()
        self._is_closed = False
        self._hears = True  # whether the listener goes on
        self._bell: Alarm | None = None
        self._key = secrets.token_hex(16)  # of this life of the worker, at the door
        self._near: LocalConnection | None = None  # set by the listener, after the line
        self._actor = pool.actor.remote(number)
        self._tell = self._actor.tell.options(concurrency_group=ORDERS)
        self._add = self._actor.add.options(concurrency_group=SUMS)
        serve = self._actor.serve.options(num_returns="streaming", concurrency_group=NEWS)
        told = ActorStart(
            script=pool.script,
            folder=None if pool.folder is None else str(pool.folder),
            threads=pool.threads,
            node=ray.get_runtime_context().get_node_id(),
            mark=this_host.mark(),
            door=None if pool.door is None else pool.door.name,
            key=self._key,
        )
        servers = () if pool.servers is None else pool.servers.actors
        news = serve.remote(pack(told), *servers)
        self._listener = threading.Thread(
            target=self._listen, args=(news,), name=f"quorate-listens-to-{number}", daemon=True
        )
        self._listener.start()

    @property
    def pid(self) -> int | None:
        """The id of a process of this host; else None."""
        return None if self.is_elsewhere else self._pid

    def watch(self, selector: BaseSelector, hear: Callback, look: Callback) -> None:
        """Have a selector call ``hear`` when messages can be moved, and ``look`` at the end."""
        is_watched = False

        def both() -> None:
            nonlocal is_watched
            if self._near is not None and not is_watched:
                is_watched = True
                self._near.watch(selector, hear, look)
            hear()
            look()

        self._bell = Alarm(selector, both)
        self._bell.ring()  # the actor may have sent news before

    def arrived(self) -> Sequence[messages.Arrived]:
        """Return all arrived messages. Does not block."""
        arrived = list[messages.Arrived]()
        for _ in range(len(self._inbox)):
            message, slot, image = self._inbox.popleft()
            if image is not None:
                image_of(self._pool.arena, ArenaPart.RESULT, slot)[:] = image
            arrived.append(message)
        return arrived + [self._placed(message) for message in super().arrived()]

    def has_ended(self) -> bool:
        """Return whether the worker is gone, and all messages have arrived. Does not block."""
        # A worker of this node writes to the coordinator's memory until its process is gone.
        return self._ending is not None and (self._near is None or self._near.has_ended())

    def wait(self, timeout_s: float) -> bool:
        """Return whether the worker ends in time. Blocks."""
        self._listener.join(timeout_s)
        return self.has_ended()

    def kill(self) -> None:
        """End the actor, and so the worker's process. Does not block."""
        if self._near is not None:
            self._near.kill()
        with suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)

    def ending(self) -> Ending:
        """Return how the worker ended, after the end."""
        assert self._ending is not None
        return self._ending

    def close(self) -> None:
        """End the worker, and wait until nothing more can come."""
        if self._is_closed:  # Ray kills nobody any more, but the actor may be there
            self._order(messages.EndWorker())
            self._listener.join(EXIT_REPORT_S)
        else:
            self.kill()
            self._listener.join(KILLED_EXIT_S)
        # After this nobody may call Ray for it: once it is shut down, a call would start another,
        # and Ray ends a process in which a thread waits for Ray then.
        self._is_closed = True
        self._hears = False
        self._listener.join(KILLED_EXIT_S)
        self._forget_orders()
        if self._near is not None:
            self._near.close()
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    # --- what is sent -----------------------------------------------------------------------------

    def post(self, message: messages.WorkerMessage, *fds: int) -> None:
        """Send a message, with images of the memory concerned. Does not block for long."""
        if self.line is not None:
            super().post(message, *fds)
            return
        parts, refs = list[ArenaPart](), list[Ref]()
        if isinstance(message, messages.ModelRequest):
            changes, shared = message.model_changes, message.shared
            if changes is not None and changes["frozen"] != self._frozen:
                self._frozen = changes["frozen"]
                parts, refs = (
                    [ArenaPart.FROZEN],
                    self._pool.store.refs([ArenaPart.FROZEN], self._frozen),
                )
            if shared is not None and shared["tensors"] is not None:
                refs = [*refs, *self._pool.store.shared(shared["stored"], fds[0])]
                parts, fds = [*parts, ArenaPart.SHARED], fds[1:]
        match message:
            case messages.ShareMemory():
                parts, refs = (
                    [ArenaPart.FROZEN],
                    self._pool.store.refs([ArenaPart.FROZEN], self._frozen),
                )
            case messages.OpenJob():
                self._jobs[message.job] = OpenJob.of(message)
                if fds:
                    parts = [*parts, ArenaPart.START]
                    refs = [*refs, self._pool.node.put(image_in(fds[0]))]
            case messages.CloseJob():
                self._jobs.pop(message.job, None)
            case messages.ComputeShards():
                job = self._jobs[message.job]
                order = job.order(message)
                if self._pool.servers is not None:  # servers add
                    order = order._replace(shards=1)
                self._orders[message.ticket] = order
                self._pool.results.ordered(self, order)
                message.following = job.next(message)
                own, values = self._sent.missing(message.snapshot, averaged=job.averaged)
                parts, refs = [*parts, *own], [*refs, *values]
        self._order(message, parts, refs)

    def leave(self, why: str) -> None:
        """Report once that the worker has to go. Thread-safe.

        Args:
            why: a fact about the node or actor: "because Ray drains the node".
        """
        if not self._leaves:
            self._leaves = True
            self.take(messages.WorkerLeaves(f"has left {self._node}, {why}"))

    def lose(self) -> None:
        """Report the loss of the worker, and of Ray. Thread-safe."""
        if self._ending is None:
            self._is_closed = True  # whatever comes is too late
            if self._near is not None:
                self._near.kill()
            self._ending = self._out_of_reach()
            self._ring()

    def cancel(self, ticket: int) -> None:
        """Report a cancelled shard, if the worker does not see the coordinator's arena."""
        if self._near is None:
            self._order(messages.CancelShards(ticket))

    def separate(self, node_sum: messages.NodeSum) -> None:
        """Have the workers of a sum hand in the results one by one. Does not block."""
        self._pool.results.separate(node_sum)

    def add(self, refs: Mapping[int, Ref], shards: int) -> Ref:
        """Return a reference to the sum of results on the worker's node."""
        return self._add.remote(pack({"of": [*refs], "shards": shards}), *refs.values())

    def _order(
        self,
        message: messages.WorkerMessage,
        parts: Sequence[ArenaPart] = (),
        refs: Sequence[Ref] = (),
    ) -> None:
        number, self._ordered = self._ordered, self._ordered + 1
        with suppress(RayError):  # the actor is gone, and the listener says so
            self._tell.remote(number, pack(message), [*parts], *refs)

    # --- what comes: in the listener's thread -----------------------------------------------------

    def _listen(self, news: Any) -> None:
        ending = Ending(1, "its actor ended without a word")
        try:
            while self._hears:
                if not ray.wait([news], timeout=STAGE_POLL_S, fetch_local=False)[0]:
                    self._pool.node.require()
                    continue
                if (ref := next(news, None)) is None:
                    break
                if self._is_closed:
                    return
                told = NEWS_READER.unpack(self._pool.node.get(ref))
                image = next(news) if told.has_image else None
                if told.doing is not None:
                    self._note(told.doing, told.ahead)
                match told.message:
                    case WorkerEnded():
                        ending = told.message.ending._replace(node=self._node)
                    case None:
                        pass
                    case message:
                        self._hear(message, image)
                del ref, image  # the object: its memory is for the next one
        except OutOfMemoryError:
            ending = Ending(-signal.SIGKILL, is_out_of_memory=True, node=self._node)
        except RayError as error:
            ending = self._lost(error)
        except UserError:  # Ray cannot be called any more
            self.lose()
        except Exception as error:  # the edge of the thread
            ending = Ending(1, f"{type(error).__name__}: {error}", node=self._node)
        self._forget_orders()
        if self._ending is None:
            self._ending = ending
        self._ring()

    def take(self, message: messages.Arrived, slot: int | None = None, image: Any = None) -> None:
        """Take an answer, with an image for the coordinator's thread to copy to the slot."""
        self._inbox.append((self._placed(message), slot, image))
        self._ring()

    def _forget_orders(self) -> None:
        for order in list(self._orders.values()):
            self._pool.results.lost(self, order)

    def _hear(self, message: ActorMessage, image: Ref | None) -> None:
        match message:
            case ActorHello():
                self._meet(message)
            case ActorStarted():
                self._pid = message.pid
                if message.near and self._pool.door is not None:
                    near = self._pool.door.take(self._key)
                    self.line, self._near = near.line, near
                    self._ring()
                else:
                    self.place = self.node_id
            case ActorLeaves():
                self.leave("because its actor was asked to end")
            case WorkerCut():
                self._is_cut = True
                self._ring()
            case messages.ShardAnswer():
                order = self._orders.pop(message.ticket)
                if image is not None and isinstance(message, messages.ShardsDone):
                    self._pool.results.done(self, order, message, image)
                else:
                    self._pool.results.lost(self, order)
                    self.take(message)
            case _:
                self.take(message)

    def _placed(self, message: M) -> M:
        """Return a message, with a note of the worker's node in case of an error."""
        error = getattr(message, "error", None)
        if isinstance(error, BaseException):
            error.add_note(f"quorate: worker {self.number} is on {self._node}")
        return message

    def _meet(self, hello: ActorHello) -> None:
        """Note the worker's node, and refuse a node that would compute something else."""
        self.node_id = hello.node
        self._node = f"{hello.host} (node {hello.node[:8]})"
        self.is_elsewhere = hello.mark != this_host.mark()
        self.host = hello.host if self.is_elsewhere else None
        differs = difference(self._pool.same, hello.same)
        if differs is not None:
            fix = "every node needs the same, at the same path"
            self.take(messages.ScriptRefused(f"cannot use {self._node}: {differs}; {fix}"))
            self.kill()
        else:
            self.take(messages.WorkerPlaced())

    def _note(self, doing: Doing, ahead: tuple[int, int] | None) -> None:
        here = doing._replace(since=time.monotonic() - doing.since)
        self._pool.arena.sheets[self.number].take(here)
        self._pool.arena.loads_ahead(self.number, ahead)

    def _out_of_reach(self) -> Ending:
        """Return the ending of a worker out of everybody's reach."""
        return Ending(1, node=self._node, lost="the Ray cluster")

    def _lost(self, error: RayError) -> Ending:
        """Return the ending of a worker whose actor was ended by Ray or the system."""
        if self._pool.node.gone is not None:  # the actor ended with the raylet
            return self._out_of_reach()
        if isinstance(error, ActorDiedError) and error.actor_init_failed:
            return Ending(1, cut(" ".join(str(error).split())[:MOST_SAID]))
        lost = "its actor"
        with suppress(RayError):  # the cluster itself may be gone
            if not self._is_closed and any(
                n["NodeID"] == self.node_id and not n["Alive"] for n in ray.nodes()
            ):
                is_preempted = isinstance(error, ActorDiedError) and error.preempted
                lost = "its node, which was preempted" if is_preempted else "its node"
        return Ending(-signal.SIGKILL, node=self._node, lost=lost)

    def _ring(self) -> None:
        bell = self._bell  # read once: the other thread may close it
        if bell is not None:
            bell.ring()
