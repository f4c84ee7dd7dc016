"""Nodes and actors of a Ray cluster that come, are drained, and are killed: the same bits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.clusters import ray_cluster
from support.heard import heard
from support.runs import LIMIT_S, command, last_json, run

pytest.importorskip("ray", reason="quorate's extra ray is not installed")
pytestmark = pytest.mark.slow

LASTS = """
import sys, time, torch, quorate

def loss(model, batch):
    time.sleep(0.01)
    return model(batch[0]).mean()

trainer = quorate.Trainer(torch.nn.Linear(1, 1), loss, batch_size=16, shards=4,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
trainer.fit(torch.utils.data.TensorDataset(torch.ones(64, 1)), steps=int(sys.argv[1]))
"""

SOON = """
from quorate.transports.processes.worker import here

if here() is None:
    from quorate.transports.ray import notices
    notices.GONE_S = 2.0
"""

KILLS = int(os.environ.get("QUORATE_TEST_KILLS", "2"))
GONE_S = 60.0  # that Ray may take to end actors, on a busy machine
STARTS = int(os.environ.get("QUORATE_TEST_STARTS", "3"))  # of runs that end in three ways


def on_a_tower(updates: int) -> str:
    tower = ("--engine", "towers", "--workers", "1")
    ended = run(command("ray_kills.py", "none", str(updates), "0", options=tower))
    assert ended.code == 0, ended.said
    return str(last_json(ended.out)["digest"])


def test_nodes_come_are_killed_and_are_drained(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with ray_cluster(tmp_path, 1) as cluster:
        options = (*cluster.options(1)[:-1], "1:3")
        with heard(command("ray_nodes.py", str(stop), "0", options=options), cluster.env) as said:
            # 1. Two nodes come: each has a worker within seconds.
            at = said.wait_for("1 take part")
            for there in (2, 3):
                cluster.add(1)
                at = said.wait_for(f"{there} take part", at)
            # 2. The one is killed, with its worker wherever that is.
            cluster.kill(1)
            at = said.wait_for("is lost with its", at)  # actor, or node: Ray tells of one first
            at = said.wait_for("2 take part", at)
            # 3. The other is drained: its worker hands over, and nothing is lost.
            cluster.drain(2)
            drained = said.wait_for("because Ray drains the node; another is starting", at)
            at = said.wait_for("1 take part", at)
            # 4. A third one comes.
            cluster.add(1)
            at = said.wait_for("2 take part", max(at, drained))
            # 5. Somebody asks an actor to end: it hands over too, and another is made in its place.
            os.kill(min(cluster.processes("AgentOfRay")), signal.SIGTERM)
            at = said.wait_for("because its actor was asked to end; another is starting", at)
            said.wait_for("is back after", at)
            stop.touch()
            assert said.ended() == 0, said.all
    # That of the node that was killed. Ray may start others there, until it knows.
    lost = [line for line in said.lines if "is lost with its" in line]
    assert sum("while starting" not in line for line in lost) == 1, said.all
    found = last_json(said.all)
    assert found["recovered_s"] < 60.0, said.all  # it waits for nobody; seconds, if busy
    assert found["digest"] == on_a_tower(found["updates"])


def test_random_actors_are_killed_at_random_moments(tmp_path: Path) -> None:
    options = ("--engine", "ray", "--workers", "2")
    words = command("ray_nodes.py", str(tmp_path / "never"), str(KILLS), options=options)
    with heard(words, {}) as said:
        assert said.ended(LIMIT_S + 30 * KILLS) == 0, said.all
    found = last_json(said.all)
    assert len(found["killed"]) == KILLS, said.all
    assert found["digest"] == on_a_tower(found["updates"])


def test_nothing_of_a_run_is_left_on_a_cluster(tmp_path: Path) -> None:
    (script := tmp_path / "lasts.py").write_text(LASTS)
    with ray_cluster(tmp_path, 2) as cluster:
        for number in range(STARTS):
            how = (None, signal.SIGINT, signal.SIGKILL)[number % 3]
            words = command(script, "5" if how is None else "100000", options=cluster.options(2))
            with heard(words, cluster.env) as said:
                if how is not None:
                    said.wait_for("epoch 1")
                    said.process.send_signal(how)
                code = said.ended()
            assert code == {None: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[how], said.all
            until = time.monotonic() + GONE_S
            while any((left := cluster.left()).values()):
                assert time.monotonic() < until, (how, left)
                time.sleep(0.1)


def test_a_run_whose_cluster_is_gone_is_saved_and_says_so(tmp_path: Path) -> None:
    (script := tmp_path / "lasts.py").write_text(SOON + LASTS)
    with ray_cluster(tmp_path, 2) as cluster:
        options = (*cluster.options(2), "--run-dir", str(tmp_path / "run"))
        with heard(command(script, "100000", options=options), cluster.env) as said:
            said.wait_for("epoch 1")
            (head,) = cluster.processes("gcs_server")
            os.kill(head, signal.SIGKILL)
            assert said.ended() == 2, said.all
    assert "has not answered for 2 s" in said.lines[-1], said.all
    assert said.lines[-1].startswith("quorate: the Ray cluster at"), said.all
    assert "saved step" in said.all
