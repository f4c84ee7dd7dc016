"""The pool of workers of a Ray cluster: an actor each, wherever Ray has room for the worker."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import ray

from quorate.engines.processes.arena import Arena
from quorate.engines.processes.pool import Callback, ElasticSize, LocalPool
from quorate.engines.processes.script import Script
from quorate.engines.ray.cluster import joined_cluster
from quorate.engines.ray.cluster_life import ClusterNotices
from quorate.engines.ray.demand import demanded
from quorate.engines.ray.images import same_everywhere
from quorate.engines.ray.node_relay import NodeRelay, ParameterStore
from quorate.engines.ray.servers import RayServers
from quorate.engines.ray.worker_handle import RayWorkerHandle
from quorate.engines.ray.worker_lease import LIFE, PLACE, WorkerLease
from quorate.engines.workers import Workers
from quorate.errors import SettingError, UserError
from quorate.machine import this_host
from quorate.machine.regular_file import is_folder
from quorate.replica.sparse.found import no_rows


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
        self.actions: deque[tuple[RayWorkerHandle, Callback]] = deque()  # for the next ``flush``
        self._lives = itertools.count()
        self._handles: dict[int, RayWorkerHandle] = {}  # the newest of each worker
        self._relays: dict[str, NodeRelay] = {}  # by node; the newest
        self.servers: RayServers | None = None
        with ExitStack() as opened:
            self.local = opened.enter_context(closing(LocalPool(script, 1, workers.threads)))
            self.node = opened.enter_context(
                joined_cluster(workers.address, demand, store_bytes, folder)
            )
            self._own_id = ray.get_runtime_context().get_node_id()
            if workers.servers is not None and handler is not None:
                self.servers = RayServers(workers.servers, handler, self.node, wake)
                opened.callback(self.servers.close)
            self.store = ParameterStore(self.node, self.servers)
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

    def _close_relays(self) -> None:
        for relay in self._relays.values():
            relay.close()

    def flush(self) -> None:
        """Carry out the actions of workers. Raise ServerError if a server is lost."""
        while self.actions:
            worker, action = self.actions.popleft()
            worker.carry_out(action)
        self.local.flush()
        if self.servers is not None:
            self.servers.require()

    def close(self) -> None:
        """End the servers, and leave the cluster."""
        self._opened.close()


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
