"""Detached runs on a Ray cluster: looked on, killed in each of their parts, stopped, ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import ray_cluster
from support.runs import LIMIT_S, command, digests, run, started, wait_for

pytest.importorskip("ray", reason="quorate's extra ray is not installed")
pytestmark = pytest.mark.slow

SCRIPT = """
import time, torch, quorate

def loss(model, batch):
    time.sleep(0.02)
    return model(batch[0]).square().mean()

torch.manual_seed(0)
trainer = quorate.Trainer(torch.nn.Linear(1, 1), loss, batch_size=16, shards=4,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.001))
trainer.fit(torch.utils.data.TensorDataset(torch.randn(64, 1)), epochs=60)
"""


def test_whoever_is_killed_the_run_goes_on_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script := tmp_path / "long.py").write_text(SCRIPT)
    folder = tmp_path / "run"
    saves = ("--run-dir", str(folder), "--save-every-steps", "5")
    with ray_cluster(tmp_path, 2) as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        words = command(script, options=("--detached", *cluster.options(2)[2:], *saves))
        listed = [*words[:3], "inspect", "--address", cluster.address]
        # 1. Who asked for it is killed: it goes on, and whoever asks again looks on.
        with started(tmp_path, words) as (process, _):
            wait_for(process, "step 8/")
            process.kill()
        assert f"{folder}  runs" in run(listed).out
        with started(tmp_path, words) as (process, _):
            # Whoever asks for something else in its name is told.
            other = run([*words[:-1], "--seed", "1", words[-1]])
            assert other.code == 2, other.said
            assert "with another script, arguments or options" in other.err
            # 2. The coordinator is killed, then its actor: it is started again, and resumes.
            wait_for(process, "step 12/")
            os.kill(_coordinator(folder), signal.SIGKILL)
            wait_for(process, "starts again (1 of 3)")
            wait_for(process, "resumed ")
            os.kill(_parent(_coordinator(folder)), signal.SIGKILL)
            wait_for(process, "resumed ")
            wait_for(process, "epoch")
            # 3. Ctrl-C here stops it there.
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 130, rest
            assert "saved step" in rest
        # 4. The same command goes on to the end, and nothing is left.
        ended = run(words)
        assert ended.code == 0, ended.said
        assert "no detached run" in run(listed).out
    on_towers = ("--engine", "towers", "--workers", "1", "--run-dir", str(tmp_path / "towers"))
    assert run(command(script, options=on_towers)).code == 0
    assert digests(folder) == digests(tmp_path / "towers")


def test_what_cannot_be_detached_is_one_line_each(tmp_path: Path) -> None:
    (script := tmp_path / "long.py").write_text(SCRIPT)
    for options, said in {
        (): "address: got None, expected a cluster",
        ("--address", "127.0.0.1:1"): "run_dir: got None, expected a folder",
        ("--address", "127.0.0.1:1", "--run-dir", "r"): "no Ray cluster is at 127.0.0.1:1",
        ("--engine", "towers"): "engine: got 'towers', expected ray",
        ("--profile", "p"): "detached: got True, expected a run that nothing is measured of",
    }.items():
        ended = run(command(script, options=("--detached", *options)))
        assert ended.code == 2, ended.said
        assert said in ended.err


def _coordinator(folder: Path) -> int:
    """Return the pid of the process that makes the updates, once there is one."""

    def found() -> int | None:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_text().split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            if str(folder) in words and "--dies-with" in words:
                return int(entry.parent.name)
        return None

    return _awaited(found)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _awaited(found: Callable[[], int | None]) -> int:
    until = time.monotonic() + LIMIT_S
    while (pid := found()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return pid
