"""Ray clusters for tests: nodes of this machine, reached with a token."""

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).parents[1] / "scripts" / "ray_cluster.py"
OF_A_RUN = (
    r"ray::quorate|WorkerLease|RelayActor|dies_with"  # in command lines of actors, and of workers
)
START_S = 120  # for the start of nodes on a busy machine


class RayCluster:
    """A running cluster. Processes on the cluster need ``env``."""

    def __init__(self, process: subprocess.Popen[str], env: dict[str, str]) -> None:
        self._process = process
        self.env = env
        self.address = self._answer()
        self.objects_before = 0  # in the object store, when a test began

    def options(self, workers: int) -> tuple[str, ...]:
        """Return the options of ``quorate run`` that run a script on the cluster."""
        return ("--engine", "ray", "--address", self.address, "--workers", str(workers))

    def tell(self, line: str) -> None:
        """Change the nodes: "add CPUS", "kill NODE", or "drain NODE" as before a preemption.

        A node is a number in the order of arrival, -1 for the last; 0 is the head.
        """
        assert self._asked(line) == "done"

    def left(self) -> dict[str, Any]:
        """Return the remains of runs: actors, placement groups, objects, and processes."""
        left: dict[str, Any] = json.loads(self._asked("left it"))
        objects = re.search(r", (\d+) objects", left["objects"])
        assert objects is not None, left
        return {**left, "objects": int(objects[1]), "processes": self.processes(OF_A_RUN)}

    def processes(self, pattern: str) -> dict[int, str]:
        """Return the processes whose command line has the pattern: those by pid."""
        words = {}
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                words[process.pid] = " ".join(process.cmdline())
        return {pid: line for pid, line in words.items() if re.search(pattern, line)}

    def _asked(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def ray_cluster(folder: Path, *cpus: int) -> Iterator[RayCluster]:
    """Run a cluster with nodes of so many CPUs each; afterwards the cluster has ended.

    Args:
        folder: gets a file with the output of the cluster's processes.
    """
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    env["RAY_worker_niceness"] = "0"  # beside other tests, Ray's 15 is next to no time
    with (
        (folder / "cluster.txt").open("w") as said,
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **env},
        ) as process,
    ):
        try:
            yield RayCluster(process, env)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(START_S)
