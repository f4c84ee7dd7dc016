"""The cluster of a run: an existing cluster, or a local cluster that ends with the run.

The process of a run is a driver of the cluster. Ray's handlers of signals, its hooks and its logs
are put back or hidden.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, worker
from ray.exceptions import RayError

from quorate.engines.ray import sweeper
from quorate.engines.ray.cluster_life import OwnNode
from quorate.engines.ray.demand import CPU, GPU, RayDemand
from quorate.errors import SettingError, UserError
from quorate.machine.environment import marked, ray_address, ray_tmpdir
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
        with process_kept():
            ray.shutdown()


def start_ray(what: str, address: str, **options: Any) -> None:
    """Call ``ray.init``, and keep handlers of signals and the hook for exceptions.

    Args:
        what: what is started, for an error message.

    Raises:
        UserError: Ray has raised an exception.
    """
    with process_kept(), refusals(what):
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
def process_kept() -> Iterator[None]:
    """Put this process's handlers of signals and hook for exceptions back after the block.

    Ray takes SIGTERM for itself. Within the block Ray's log is hidden.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    hook: Callable[..., object] = sys.excepthook
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
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


# Ray's file with the token that a local cluster requires, since 2.59 by default. Without a token
# all users who can reach the ports of a cluster can run programs there.
TOKEN = Path(".ray", "auth_token")

# The longest path of a Unix socket, and Ray's addition to the path of a folder:
# /session_2026-11-24_19-06-55_509164_4194304/sockets/plasma_store
PATH_BYTES = 103 if sys.platform == "darwin" else 107
ADDED_BYTES = 64
OWN = "ray"  # Ray's folder within ours: Ray opens all of its folders to all users
FOLDER = "quorate-"

LEAST_STORE_BYTES = 128 << 20  # of a local cluster; Ray takes no less than 75 MiB


@contextmanager
def joined_cluster(
    address: str | None, demand: RayDemand, store_bytes: int, folder: Path | None
) -> Iterator[OwnNode]:
    """Within the block this process is a driver of a Ray cluster; yields the node of this process.

    After the block a local cluster is gone; a connection made by the script stays.

    Args:
        address: of a cluster, "HOST:PORT", or "auto" for the cluster of this machine. None starts a
            local cluster, unless this process is connected already, or the environment has an
            address (as in a Ray job).
        demand: the resources of the run.
        store_bytes: the size of the object store of a local cluster.
        folder: a folder to send to every node, into the working directory of actors.

    Raises:
        UserError: there is no cluster, its versions differ, or resources are lacking.
    """
    options = {} if folder is None else {"runtime_env": {"working_dir": str(folder)}}
    closing, is_local = ExitStack(), False
    try:
        closing.enter_context(no_raylet_logs())
        if ray.is_initialized():
            if folder is not None:
                raise UserError(
                    "working_dir",
                    "the script is connected to Ray already",
                    fix="give it to ray.init, runtime_env={'working_dir': ...}, or let quorate "
                    "connect with address=",
                )
            say = closing.enter_context(_swept())
        elif address := address or ray_address():
            say = closing.enter_context(_swept())
            closing.enter_context(connected(address, log_to_driver=True, **options))
        else:
            is_local = True
            say = closing.enter_context(_local_cluster(demand, store_bytes, options))
        with refusals("Ray has ended while it was started"):
            node = OwnNode(is_local=is_local)
            closing.callback(node.close)
            say(node.raylet)
            resources = {name: float(n) for name, n in ray.cluster_resources().items()}
        if missing := demand.missing(resources):
            raise UserError(
                "the Ray cluster has too little",
                "; ".join(missing),
                fix="use fewer workers, smaller worker_resources, or workers='N:M', which "
                "waits for nodes that are yet to come",
            )
        yield node
    finally:
        with process_kept():
            closing.close()


@contextmanager
def _local_cluster(
    demand: RayDemand, store_bytes: int, options: Mapping[str, Any]
) -> Iterator[Callable[[str], None]]:
    """Within the block there is a local cluster, and nothing of the cluster afterwards.

    Yields the function of ``_swept``.
    """
    mark, count = secrets.token_hex(16), demand.of_one_machine
    with session_folder() as folder, _swept(mark, folder) as say:
        with on_loopback(), marked(mark):
            start_ray(
                "a local Ray cluster cannot be started",
                "local",
                num_cpus=max(1, round(count * demand.resources.get(CPU, 0.0) + 0.5)),
                num_gpus=round(count * demand.resources.get(GPU, 0.0)) or None,
                object_store_memory=max(LEAST_STORE_BYTES, store_bytes),
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=True,
                _temp_dir=str(Path(folder, OWN)),
                **options,
            )
        try:
            with suppress(OSError, RuntimeError):  # Ray leaves the mode to the umask
                (Path.home() / TOKEN).chmod(0o600)
            yield say
        finally:
            ray.shutdown()


@contextmanager
def session_folder() -> Iterator[str]:
    """Yield a new folder for the files of a local cluster; after the block the folder is removed.

    Ray lets everybody write to its folders; the mode of this folder (0700) keeps all users but the
    owner out.

    Raises:
        UserError: no folder has a path that is short enough.
    """
    chosen = ray_tmpdir()
    refused = list[str]()
    for parent in [tempfile.gettempdir(), "/tmp"] if chosen is None else [chosen]:
        most = PATH_BYTES - ADDED_BYTES - len(f"/{FOLDER}12345678/{OWN}")
        if (length := len(os.fsencode(Path(parent).absolute()))) > most:
            refused.append(f"{parent} has {length} bytes, expected at most {most}")
            continue
        try:
            folder = tempfile.mkdtemp(prefix=FOLDER, dir=Path(parent).absolute())
        except OSError as error:
            refused.append(f"{parent}: {error.strerror}")
            continue
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    raise UserError(
        "a local Ray cluster needs a folder with a short path, as Unix sockets lie in it",
        "; ".join(refused),
        fix="set RAY_TMPDIR to another folder",
    )


@contextmanager
def _swept(mark: str = "", folder: str = "") -> Iterator[Callable[[str], None]]:
    """After the block, or after this process, nothing is left of a local cluster.

    Yields a function for the path of the raylet's socket: if this process ends without a word after
    the end of the raylet, the sweeper says why.

    Args:
        mark: a word in the environment of all processes of the cluster; empty: none is swept.
        folder: with the files of the cluster; empty: none is swept.
    """
    if sys.platform != "linux":  # Ray alone looks after its processes there
        yield lambda _: None
        return
    with subprocess.Popen(
        [sys.executable, "-S", sweeper.__file__, mark, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # nobody's Ctrl-C ends it
    ) as process:
        assert process.stdin is not None
        pipe = process.stdin

        def say(path: str) -> None:
            with suppress(BrokenPipeError):
                pipe.write(f"{path}\n".encode())
                pipe.flush()

        try:
            yield say
        finally:
            # By a word: processes forked meanwhile hold the pipe too.
            with suppress(BrokenPipeError):
                process.communicate(f"{sweeper.END}\n".encode())
