"""A connection of this process to an existing Ray cluster, as a driver."""

from __future__ import annotations

import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import ray
from ray._private import ray_constants, worker
from ray.exceptions import RayError

from quorate.errors import SettingError, UserError
from quorate.machine.limits import CLUSTER_CONNECT_S

# The beginning of Ray's text after the end of a raylet: pages of a log, guesses, a worker's stack.
OF_A_LOST_RAYLET = re.compile(
    "Raylet is terminated|The node with node id|The raylet exited immediately because"
    "|Check failed: raylet_ipc_client_"
)


@contextmanager
def connected(address: str, **options: Any) -> Iterator[None]:
    """Within the block this process is a driver of the cluster at an address.

    Args:
        address: "HOST:PORT", or "auto" for the cluster of this machine.
        options: of ``ray.init``.

    Raises:
        UserError: there is no cluster, or its versions differ.
    """
    _require_somebody(address)
    start_ray(f"Ray at {address}", address, **options)
    try:
        yield
    finally:
        with signals_kept():
            ray.shutdown()


def start_ray(what: str, address: str, **options: Any) -> None:
    """Call ``ray.init``, and keep handlers of signals and the hook for exceptions.

    Args:
        what: what is started, for an error message.

    Raises:
        UserError: Ray has raised an exception.
    """
    with signals_kept(), hooks_kept(), refusals(what):
        ray.init(address, configure_logging=False, **options)


def _require_somebody(address: str) -> None:
    """Raise an error soon if nobody is there: Ray itself tries for a minute, and prints a page."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        expected = "HOST:PORT of a cluster's head, or auto"
        raise SettingError("address", address, expected, "`ray start --head` prints it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster is at {address} ({error})",
            fix="start one with `ray start --head`, or leave the address out for a local one",
        ) from error


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Within the block exceptions of Ray become a ``UserError``."""
    try:
        yield
    except (RayError, RuntimeError, ValueError, OSError) as error:
        # Ray's messages are long; the first sentences name the error.
        raise UserError(what, " ".join(str(error).split())[:500]) from error


@contextmanager
def signals_kept() -> Iterator[None]:
    """Put handlers of signals back after the block: Ray takes SIGTERM for itself."""
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
def hooks_kept() -> Iterator[None]:
    """Put the hook for exceptions back after the block, and hide Ray's log within the block."""
    hook: Callable[..., object] = sys.excepthook
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        sys.excepthook = hook
        log.setLevel(level)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Within the block a new cluster listens on the loopback interface alone.

    Ray takes a loopback address for a node where clusters of several machines are switched off, as
    on macOS and Windows. The switch is a private name of Ray's. Without the switch Ray would listen
    on all interfaces: ``test_nothing_of_a_local_cluster_is_left`` in
    ``tests/end_to_end/test_ray.py`` looks at the ports.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def no_raylet_logs() -> Iterator[None]:
    """Within the block Ray prints no pages when a raylet ends.

    quorate says in a line who is lost. Where Ray has no function of this private name any more,
    the pages are printed.
    """
    shown = getattr(worker, "print_to_stdstream", None)
    if shown is None:
        yield
        return

    def show(data: dict[str, Any], *arguments: Any, **named: Any) -> None:
        lines = data.get("lines", [])
        before = [*takewhile(lambda line: not OF_A_LOST_RAYLET.search(line), lines)]
        if before or not lines:
            shown({**data, "lines": before}, *arguments, **named)

    worker.print_to_stdstream = show
    try:
        yield
    finally:
        worker.print_to_stdstream = shown
