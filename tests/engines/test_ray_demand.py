"""A run's demand on a Ray cluster, and refusals before there is a cluster."""

from pathlib import Path

import pytest
from support.messages import expect_message
from support.runs import command

from quorate.__main__ import main

SCRIPT = """
import torch, quorate
trainer = quorate.Trainer(torch.nn.Linear(1, 1), lambda model, batch: model(batch).mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch_size=2)
trainer.fit(torch.ones(8, 1), steps=1)
"""
RAY = "--engine ray --workers 2"
THERE = "--address 127.0.0.1:1"
# Options, and how the line begins.
REFUSED = {
    **{
        f"{RAY} --worker-resources={text}": "worker_resources: got "
        for text in ("", "CPU", "CPU=many", "=1", "CPU=-1", "CPU=inf", "CPU=nan")
    },
    # A worker has a single device.
    f"{RAY} --worker-resources GPU=2": "worker_resources: got 'GPU=2'",
    f"{RAY} --worker-resources GPU=1": "devices: got 'cpu'",
    # The share of others' cluster has to be given; and only Ray has a cluster, or a growing crew.
    f"--engine ray {THERE}": "workers: got ",
    f"--workers 2 {THERE}": "address: got '127.0.0.1:1'",
    "--workers 1:2": "workers: got '1:2'",
    "--workers 1:2 --engine towers": "workers: got '1:2'",
    "--workers 1:2 --engine processes": "workers: got '1:2'",
    "--workers 1:2 --engine collective": "workers: got '1:2'",
    # A run that goes on without its caller needs a cluster and a folder.
    "--detached": "address: got None, expected a cluster",
    f"--detached {THERE}": "run_dir: got None, expected a folder",
    "--detached --engine towers": "engine: got 'towers', expected ray",
    "--detached --profile p": "detached: got True, expected a run that nothing is measured of",
    # Servers are refused where they are of no use.
    "--workers 2 --engine processes --servers 2": "servers: got 2",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_is_one_line(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (script := tmp_path / "script.py").write_text(SCRIPT)
    assert main(command(script, options=tuple(options.split()))[3:]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"quorate: {REFUSED[options]}"), line
    if "worker-resources=" not in options:
        expect_message(line)
