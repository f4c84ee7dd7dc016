"""The cluster: one that is there, or a local one that is started for a run and ends with it."""

from __future__ import annotations

import logging
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from quorate.errors import UserError
from quorate.machine.environment import marked, ray_address
from quorate.transports.ray import sweeper
from quorate.transports.ray.connection import connected, hooks_kept, refusals, signals_kept
from quorate.transports.ray.demand import CPU, GPU, Demand

# Where Ray keeps the token that a local cluster asks for, since 2.59 by itself: whoever can reach
# the ports of one without can run programs there.
TOKEN = Path(".ray", "auth_token")

LEAST_STORE_BYTES = 128 << 20  # of a local cluster; Ray takes no less than 75 MiB


class Cluster:
    """This process as a driver of Ray's. ``close`` it.

    Args:
        address: of a cluster, "HOST:PORT", or "auto" for the one of this machine; None starts a
            local one, unless this process is connected already, or the environment says where
            (that of a Ray job does).
        demand: what the run takes of it.
        store_bytes: what a local one has to have for objects.
        folder: that travels to every node, into the folder that actors are in.

    Raises:
        UserError: there is none, it is of other versions, or lacks what is asked for.
    """

    def __init__(
        self, address: str | None, demand: Demand, store_bytes: int, folder: Path | None
    ) -> None:
        self._closing = ExitStack()
        self._travels: dict[str, Any] = (
            {} if folder is None else {"runtime_env": {"working_dir": str(folder)}}
        )
        try:
            if not ray.is_initialized():
                address = address or ray_address()
                if address is None:
                    self._start(demand, store_bytes)
                else:
                    connection = connected(address, log_to_driver=True, **self._travels)
                    self._closing.enter_context(connection)
            elif folder is not None:
                raise UserError(
                    "working_dir: the script is connected to Ray already; give it to ray.init, "
                    "runtime_env={'working_dir': ...}, or let quorate connect with address="
                )
            self._require(demand)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the cluster; a local one ends. One that the script is connected to stays."""
        with signals_kept():
            self._closing.close()

    def _start(self, demand: Demand, store_bytes: int) -> None:
        mark, count = secrets.token_hex(16), demand.of_one_machine
        self._closing.enter_context(_swept(mark))
        with (
            signals_kept(),
            hooks_kept(),
            refusals("a local Ray cluster cannot be started"),
            marked(mark),
        ):
            ray.init(
                "local",
                num_cpus=max(1, round(count * demand.resources.get(CPU, 0.0) + 0.5)),
                num_gpus=round(count * demand.resources.get(GPU, 0.0)) or None,
                object_store_memory=max(LEAST_STORE_BYTES, store_bytes),
                include_dashboard=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                log_to_driver=True,
                **self._travels,
            )
        self._closing.callback(ray.shutdown)
        with suppress(OSError, RuntimeError):  # Ray leaves that to the umask
            (Path.home() / TOKEN).chmod(0o600)

    def _require(self, demand: Demand) -> None:
        there = {name: float(number) for name, number in ray.cluster_resources().items()}
        if missing := demand.missing(there):
            raise UserError(
                f"the Ray cluster has too little: {'; '.join(missing)}; use fewer workers, smaller "
                "worker_resources, or workers='N:M', which waits for nodes that are yet to come"
            )


@contextmanager
def _swept(mark: str) -> Iterator[None]:
    """After the block, or this process, nothing lives that was started with a mark."""
    if sys.platform != "linux":  # there Ray's own looking after is what there is
        yield
        return
    with subprocess.Popen(
        [sys.executable, "-S", sweeper.__file__, mark],
        stdin=subprocess.PIPE,
        start_new_session=True,  # nobody's Ctrl-C ends it
    ) as process:
        try:
            yield
        finally:
            # By a word: whoever was forked meanwhile holds the pipe too.
            with suppress(BrokenPipeError):
                process.communicate(b"end")
