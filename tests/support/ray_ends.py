"""Processes of Ray that are killed under a run, and what became of the run."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from support.clusters import RayCluster, ray_cluster
from support.heard import Heard, heard
from support.runs import TOWER, command, last_json, processes_of, run, started

LASTS = """
import sys, time, torch, quorate
from quorate.transports.processes.worker import here

def loss(model, batch):
    if here() is not None:
        time.sleep(0.01)
    return model(batch[0]).square().mean()

torch.manual_seed(0)
trainer = quorate.Trainer(torch.nn.Linear(400, 1000), loss, batch_size=16, shards=4,
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-4))
trainer.fit(torch.utils.data.TensorDataset(torch.ones(64, 400)), steps=1_000_000)
"""

# Who is killed, and how their command lines begin or what is in them.
PROCESSES = {
    "raylet": "raylet/raylet ",
    "gcs": "gcs/gcs_server ",
    "dashboard agent": "^ray::DashboardAgent",
    "runtime agent": "^ray::RuntimeEnvAgent",
    "server": "^ray::quorate server|^ray::Server",
}
SAYS = r"quorate: (Ray's (raylet|head process, gcs_server,) on this machine|server 0 of 1 on)"


class End(NamedTuple):
    """What became of a run."""

    code: int
    seconds: float  # from the kill
    is_saved: bool
    last: str  # line
    said: str
    left: list[str]  # its processes, and its folders for temporary files


def on_a_local_cluster(folder: Path, who: str, chance: random.Random) -> End:
    """Run a script on a local cluster, kill one of Ray's processes, and return the end."""
    (script := folder / "lasts.py").write_text(LASTS)
    servers = ("--servers", "1") if who == "server" else ()
    options = ("--engine", "ray", "--workers", "2", *servers, "--run-dir", str(folder / "run"))
    with started(folder, command(script, options=options)) as (process, mark):
        said = Heard(process)
        code, seconds = _killed(said, chance, lambda: _kill(processes_of(mark), who))
        left = _left(lambda: [*processes_of(mark).values()])
        temporary = (folder / "temporary").resolve()
        files = [str(path) for path in temporary.glob("quorate-*")]
        return _end(said, code, seconds, [*left, *files])


def on_own_node(folder: Path, who: str, chance: random.Random) -> End:
    """Likewise, on a cluster of two nodes that is there: a process of the coordinator's own."""
    (script := folder / "lasts.py").write_text(LASTS)
    with ray_cluster(folder, 1, 1) as cluster:
        options = (*cluster.options(2), "--run-dir", str(folder / "run"))
        with heard(command(script, options=options), cluster.env) as said:
            kill = lambda: _kill(_of_first_node(cluster, who), who)  # noqa: E731
            code, seconds = _killed(said, chance, kill)
            left = _left(lambda: [*cluster.processes("AgentOfRay|dies_with").values()])
            return _end(said, code, seconds, left)


def nodes_of_one_run(folder: Path, count: int, chance: random.Random) -> End:
    """Run a script on a cluster, kill the node of a worker again and again, and return the end.

    ``seconds`` are the longest from a kill to the end of the update under way.
    """
    stop = folder / "stop"
    with ray_cluster(folder, 1, 1) as cluster:
        options = (*cluster.options(1)[:-1], "1:2")
        with heard(command("ray_nodes.py", str(stop), "0", options=options), cluster.env) as said:
            at = said.wait_for("2 take part")
            for node in range(1, count + 1):
                time.sleep(chance.uniform(0.0, 2.0))
                cluster.kill(node)
                at = said.wait_for("1 take part", at)
                cluster.add(1)
                at = said.wait_for("2 take part", at)
            stop.touch()
            code = said.ended()
        left = _left(lambda: [*cluster.processes("AgentOfRay|dies_with").values()])
    found = last_json(said.all)
    alike = run(command("ray_kills.py", "none", str(found["updates"]), "0", options=TOWER))
    same = last_json(alike.out)["digest"] == found["digest"]
    last = f"quorate: {count} nodes, {found['updates']} updates, {'same' if same else 'OTHER'} bits"
    return End(code, found["recovered_s"], False, last, said.all, left)


def _of_first_node(cluster: RayCluster, who: str) -> dict[int, str]:
    """Return the process, which is the oldest of its kind: the head's."""
    found = cluster.processes(PROCESSES[who])
    return {min(found): found[min(found)]}


def _kill(processes: dict[int, str], who: str) -> None:
    """Kill the one process that is meant."""
    (pid,) = [
        pid for pid, line in processes.items() if re.search(PROCESSES[who], line.replace("\0", " "))
    ]
    os.kill(pid, signal.SIGKILL)


def _killed(said: Heard, chance: random.Random, kill: Callable[[], None]) -> tuple[int, float]:
    """Kill at a random moment of a run; return its exit code, and how long its end took."""
    said.wait_for("epoch 1")
    time.sleep(chance.uniform(0.0, 2.0))
    kill()
    at = time.monotonic()
    code = said.ended(120.0)
    return code, time.monotonic() - at


def _left(look: Callable[[], list[str]]) -> list[str]:
    """Return what is left of a run a while after its end."""
    until = time.monotonic() + 30.0
    while (left := look()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _end(said: Heard, code: int, seconds: float, left: list[str]) -> End:
    last = said.lines[-1].strip() if said.lines else ""
    return End(code, seconds, "saved step" in said.all, last, said.all, left)
