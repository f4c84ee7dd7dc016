"""A Ray cluster on two hosts, and a link between them that is cut: the same bits."""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from pathlib import Path

import pytest
from support import hosts as several
from support.heard import Heard
from support.hosts import Host
from support.runs import command, last_json, run

pytest.importorskip("ray", reason="quorate's extra ray is not installed")
pytestmark = pytest.mark.slow

RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if (why := several.obstacle()) is not None:
        pytest.skip(why)


def node(host: Host, *options: str) -> list[str]:
    small = ("--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats")
    return [RAY, "start", f"--node-ip-address={host.address}", *small, *options]


def alone(host: Host, folder: Path, script: str) -> list[str]:
    """Return a command line with a folder of the host's own where Ray has its files."""
    own = folder / host.name
    own.mkdir()
    return ["sh", "-c", f"mount --bind {own} /tmp/ray && {script}"]


def test_a_link_is_cut_for_5_s_and_for_good(tmp_path: Path) -> None:
    Path("/tmp/ray").mkdir(exist_ok=True)
    ready, stop = tmp_path / "ready", tmp_path / "stop"
    # Ray takes a minute by itself to believe that a host is gone whose connections do not break.
    health = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000"}
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), **health}
    env["RAY_health_check_failure_threshold"] = "10"
    with several.hosts(2) as (first, second):
        # A driver finds Ray's processes of its host in /proc, so that it is started beside them.
        at = f"{first.address}:{PORT}"
        head = node(first, "--head", f"--port={PORT}", "--include-dashboard=false")
        options = ("--engine", "ray", "--address", at, "--workers", "2")
        words = command("ray_nodes.py", str(stop), "0", options=options)
        script = f"{shlex.join(head)} && while ! test -e {ready}; do sleep 0.1; done; "
        said = Heard(first.start(alone(first, tmp_path, script + shlex.join(words)), env))
        said.wait_for("Ray runtime started")
        other = node(second, "--block", f"--address={at}")
        joins = Heard(second.start(alone(second, tmp_path, shlex.join(other)), env))
        joins.wait_for("Ray runtime started")
        ready.touch()
        lines = said.wait_for("2 take part")
        # 1. For a while: the other goes on, also with its shards; nobody is lost.
        second.cut()
        time.sleep(5)
        second.mend()
        time.sleep(3)
        assert "is lost with" not in said.all, said.all
        # 2. For good: its worker is named when Ray says so, and the run goes on.
        second.cut()
        lines = said.wait_for("is lost with its", lines)
        assert "on host-b (node" in said.lines[lines - 1], said.all
        assert "another is starting" in said.lines[lines - 1], said.all
        said.wait_for("1 take part", lines)
        stop.touch()
        assert said.ended() == 0, said.all
        second.kill()
        joins.ended()
    found = last_json(said.all)
    assert found["recovered_s"] < 60.0, said.all  # it waits for nobody; seconds, if busy
    tower = ("--engine", "towers", "--workers", "1")
    alike = run(command("ray_kills.py", "none", str(found["updates"]), "0", options=tower))
    assert last_json(alike.out)["digest"] == found["digest"]
