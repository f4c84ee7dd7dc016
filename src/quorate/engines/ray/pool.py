"""The site of workers of a Ray cluster: an actor each, wherever Ray has room for it."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import ray

from quorate.engines.processes.arena import Arena
from quorate.engines.processes.script import Script
from quorate.engines.ray.agent import AgentOfRay
from quorate.engines.ray.cluster import Cluster
from quorate.engines.ray.demand import Demand
from quorate.engines.ray.near import Door
from quorate.engines.ray.notices import Notices
from quorate.engines.ray.published import Published
from quorate.engines.ray.relayed import same_everywhere
from quorate.engines.ray.results import Results
from quorate.engines.ray.servers import RayServers
from quorate.engines.ray.worker_handle import NEWS, ORDERS, SUMS, RayWorkerHandle
from quorate.errors import SettingError, UserError
from quorate.machine.regular_file import is_folder
from quorate.replica.sparse.found import no_rows


class RayPool:
    """The cluster, with a place for each worker. ``close`` it.

    Args:
        script: what workers run.
        arena: the coordinator's.
        demand: what the run takes.
        address: of the cluster; see ``Cluster``.
        working_dir: a folder with the script that travels to every node. None: the script is at
            the same path there.
        threads: intra-op threads of each worker.
        servers: how many have the parameters, and what they do: see ``RayServers``.

    Raises:
        UserError: there is no such cluster, or it lacks what is asked for.
        SettingError: the script is not in the folder that is to travel, or gradients are by rows.
        ServerError: a server cannot be started.
    """

    takes_runs = False  # results travel one by one

    def __init__(
        self,
        script: Script,
        arena: Arena,
        demand: Demand,
        address: str | None,
        working_dir: str | None,
        threads: int,
        servers: tuple[int, str] | None = None,
    ) -> None:
        if by_rows := arena.parameters.layout.by_rows:  # a result is the image of a slot, no more
            raise no_rows("engine", "ray", min(by_rows))
        folder = None if working_dir is None else folder_of(script, working_dir)
        # Of parameters as many versions as workers may read, and of results one each.
        store_bytes = (2 * demand.of_one_machine + 4) * arena.slot_bytes
        self._script = script
        self._folder = folder
        self._same = same_everywhere(script)
        self._arena = arena
        self._threads = threads
        self._hands: dict[int, RayWorkerHandle] = {}  # the newest of each worker
        self.servers: RayServers | None = None
        with ExitStack() as undo:
            self._cluster = Cluster(address, demand, store_bytes, folder)
            undo.callback(self._cluster.close)
            if servers is not None:
                self.servers = RayServers(*servers, self._cluster.node)
                undo.callback(self.servers.close)
            self._published = Published(arena, self._cluster.node, self.servers)
            self._results = Results(arena, self._cluster.node)
            self._notices = Notices(lambda: list(self._hands.values()), self._cluster.node)
            undo.pop_all()
        self._door: Door | None = None
        if self.servers is None:  # else nobody computes from what is here
            with suppress(OSError):  # workers of this node are as those of others then
                self._door = Door()
        self._actor = ray.remote(
            max_restarts=0,  # another is made in its place, when that is decided
            scheduling_strategy="SPREAD",
            concurrency_groups={NEWS: 1, ORDERS: 1, SUMS: 1},
            **demand.options(),
        )(AgentOfRay)

    def start(self, number: int) -> RayWorkerHandle:
        """Ask for a worker. It waits until there is room for it. Does not block.

        Raises:
            UserError: the cluster is gone.
        """
        if self._notices.gone is not None:
            raise UserError(self._notices.gone)
        told = (self._script, self._folder, self._same, self._arena, self._published)
        how = (self._results, self._threads, self._door, self._cluster.node)
        hand = RayWorkerHandle(number, self._actor, *told, *how)
        self._hands[number] = hand
        return hand

    def flush(self) -> None:
        """Raise ServerError if a server is lost. What waits Ray has."""
        if self.servers is not None:
            self.servers.require()

    def close(self) -> None:
        """End the servers, and leave the cluster."""
        self._notices.close()
        if self._door is not None:
            self._door.close()
        if self.servers is not None:
            self.servers.close()
        self._cluster.close()


def folder_of(script: Script, working_dir: str) -> Path:
    """Return the folder that is to travel.

    Raises:
        SettingError: the script is not in it.
    """
    folder = Path(script.folder, working_dir).resolve()
    if not is_folder(folder) or not Path(script.path).resolve().is_relative_to(folder):
        expected = f"a folder that {script.path} is in"
        raise SettingError("working_dir", working_dir, expected, "name the script's own folder")
    return folder
