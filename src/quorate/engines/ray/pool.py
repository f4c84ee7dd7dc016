"""The pool of workers of a Ray cluster: an actor each, wherever Ray has room for the worker."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import ray

from quorate.engines.processes.arena import Arena
from quorate.engines.processes.script import Script
from quorate.engines.ray.cluster import joined_cluster
from quorate.engines.ray.demand import RayDemand
from quorate.engines.ray.handover import HandoverSocket
from quorate.engines.ray.images import same_everywhere
from quorate.engines.ray.node_results import NodeResults
from quorate.engines.ray.notices import ClusterNotices
from quorate.engines.ray.parameter_store import ParameterStore
from quorate.engines.ray.servers import RayServers
from quorate.engines.ray.worker_actor import WorkerActor
from quorate.engines.ray.worker_handle import NEWS, ORDERS, SUMS, RayWorkerHandle
from quorate.errors import SettingError, UserError
from quorate.machine.regular_file import is_folder
from quorate.replica.sparse.found import no_rows


class RayPool:
    """The workers of a Ray cluster, an actor each. Needs ``close``.

    Args:
        script: the script to run.
        arena: the coordinator's.
        demand: the resources of the run.
        address: of the cluster; see ``joined_cluster``.
        working_dir: a folder with the script, sent to every node. None: every node has the script
            at the same path.
        threads: intra-op threads of each worker.
        servers: the number of servers with the parameters, and their handler: see ``RayServers``.

    Raises:
        UserError: there is no such cluster, or the cluster lacks resources.
        SettingError: the script is not in ``working_dir``, or gradients are by rows.
        ServerError: a server cannot be started.
    """

    takes_runs = False  # results travel one by one

    def __init__(
        self,
        script: Script,
        arena: Arena,
        demand: RayDemand,
        address: str | None,
        working_dir: str | None,
        threads: int,
        servers: tuple[int, str] | None = None,
    ) -> None:
        if by_rows := arena.parameters.layout.by_rows:  # a result is the image of a slot, no more
            raise no_rows("engine", "ray", min(by_rows))
        folder = None if working_dir is None else folder_of(script, working_dir)
        # As many versions of parameters as workers may read, and a result of each worker.
        store_bytes = (2 * demand.of_one_machine + 4) * arena.slot_bytes
        self.script = script
        self.folder = folder
        self.same = same_everywhere(script)
        self.arena = arena
        self.threads = threads
        self._handles: dict[int, RayWorkerHandle] = {}  # the newest of each worker
        self.servers: RayServers | None = None
        self.door: HandoverSocket | None = None
        with ExitStack() as closing:
            self.node = closing.enter_context(joined_cluster(address, demand, store_bytes, folder))
            if servers is not None:
                self.servers = RayServers(*servers, self.node)
                closing.callback(self.servers.close)
            else:  # workers compute from the coordinator's memory
                with suppress(OSError):  # workers of this node are reached like all workers then
                    self.door = HandoverSocket()
                    closing.callback(self.door.close)
            self.store = ParameterStore(arena, self.node, self.servers)
            self.results = NodeResults(arena, self.node)
            closing.callback(self._handles.clear)
            self._notices = ClusterNotices(lambda: list(self._handles.values()), self.node)
            closing.callback(self._notices.close)
            self._closing = closing.pop_all()
        self.actor = ray.remote(
            max_restarts=0,  # the supervisor decides whether a new actor takes its place
            scheduling_strategy="SPREAD",
            concurrency_groups={NEWS: 1, ORDERS: 1, SUMS: 1},
            **demand.options(),
        )(WorkerActor)

    def start(self, number: int) -> RayWorkerHandle:
        """Request a worker, for when the cluster has room. Does not block.

        Raises:
            UserError: the cluster is gone.
        """
        if self._notices.gone is not None:
            raise UserError(self._notices.gone)
        handle = self._handles[number] = RayWorkerHandle(number, self)
        return handle

    def flush(self) -> None:
        """Raise ServerError if a server is lost. Ray keeps delayed requests itself."""
        if self.servers is not None:
            self.servers.require()

    def close(self) -> None:
        """End the servers, and leave the cluster."""
        self._closing.close()


def folder_of(script: Script, working_dir: str) -> Path:
    """Return the folder to send to every node.

    Raises:
        SettingError: the script is not in the folder.
    """
    folder = Path(script.folder, working_dir).resolve()
    if not is_folder(folder) or not Path(script.path).resolve().is_relative_to(folder):
        expected = f"a folder that {script.path} is in"
        raise SettingError("working_dir", working_dir, expected, "name the script's own folder")
    return folder
