"""The cluster of a run: an existing cluster, or a local cluster that ends with the run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from quorate.engines.ray import sweeper
from quorate.engines.ray.connection import (
    connected,
    no_raylet_logs,
    on_loopback,
    refusals,
    signals_kept,
    start_ray,
)
from quorate.engines.ray.demand import CPU, GPU, RayDemand
from quorate.engines.ray.own_node import OwnNode
from quorate.errors import UserError
from quorate.machine.environment import marked, ray_address, ray_tmpdir

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
        with signals_kept():
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
