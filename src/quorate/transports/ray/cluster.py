"""The cluster: one that is there, or a local one that is started for a run and ends with it."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from quorate.errors import SettingError, UserError
from quorate.machine.environment import marked, ray_address
from quorate.transports.ray import sweeper
from quorate.transports.ray.demand import CPU, GPU, Demand

CONNECT_S = 5.0  # how long whoever is at an address may take to answer

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
                    self._join(address)
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
        with _signals_kept():
            self._closing.close()

    def _join(self, address: str) -> None:
        _require_somebody(address)
        with _signals_kept(), _hooks_kept(), _refusals(f"Ray at {address}"):
            ray.init(address, configure_logging=False, log_to_driver=True, **self._travels)
        self._closing.callback(ray.shutdown)

    def _start(self, demand: Demand, store_bytes: int) -> None:
        mark, count = secrets.token_hex(16), demand.of_one_machine
        self._closing.enter_context(_swept(mark))
        with (
            _signals_kept(),
            _hooks_kept(),
            _refusals("a local Ray cluster cannot be started"),
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


def _require_somebody(address: str) -> None:
    """Find out soon whether anybody is there: Ray itself tries for a minute, and says a page."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        expected = "HOST:PORT of a cluster's head, or auto"
        raise SettingError("address", address, expected, "`ray start --head` prints it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster is at {address} ({error}); start one with `ray start --head`, or "
            "leave the address out for a local one"
        ) from error


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Within the block what Ray raises is a user's mistake, or a machine's state."""
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        # Ray's messages are long; the first sentences say what it is.
        raise UserError(f"{what}: {' '.join(str(error).split())[:500]}") from error


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


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Within the block signals may be given other handlers: Ray takes SIGTERM for itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _hooks_kept() -> Iterator[None]:
    """Within the block Ray may show exceptions its own way, and say what it does by the way."""
    hook: Callable[..., object] = sys.excepthook
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        sys.excepthook = hook
        log.setLevel(level)
