"""Trainings on simulated devices: each has the CPU's digest, on any number of devices.

Streams run late, and accesses without the order of a wait raise: the digests are not equal by luck.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.accelerator import build, environment
from support.accelerator.runs import OnDevices
from support.references import References
from support.scenarios import Here
from support.trainings.configuration import parse
from support.trainings.runner import Outcome, differences, run_configuration

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.lacking() is not None, reason=build.lacking() or ""),
]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
RUNS = [
    ("sim:0", "model=mlp optimizer=adam options=ema+clip+schedule data=augmented engine=inline"),
    ("sim:0 sim:1", "model=convolution optimizer=adamw options=validation engine=towers:2"),
    ("sim:0 sim:1 sim:2 sim:3", "model=mlp optimizer=adam data=loaded engine=towers:4"),
    ("sim:0 sim:1", "model=contrastive optimizer=adam options=clip data=short engine=towers:2"),
    ("sim:0 sim:1", "model=tied optimizer=adamw options=checks data=short engine=processes:2"),
    ("sim:2 sim:3", "model=mlp engine=processes:2 event=kill-worker at=3"),
    (
        "sim:0 sim:1",
        "model=mlp optimizer=adamw options=ema+clip data=weighted shards=5 engine=ranks:2",
    ),
    ("sim:3 sim:1 sim:0 sim:2", "model=mlp optimizer=adam options=clip data=short engine=ranks:4"),
    ("sim:1 sim:0", "model=convolution engine=ranks:2 event=kill-worker at=3 then=towers:2"),
    ("sim:0 sim:1", "model=mlp optimizer=adam data=augmented engine=stages"),
    (
        "sim:0 sim:1",
        "model=transformer optimizer=sgd options=clip data=plain shards=3 engine=stages",
    ),
    ("sim:1 sim:0", "model=mlp optimizer=adam engine=stages event=resume at=3 then=towers:2"),
]


@pytest.mark.parametrize(("devices", "line"), RUNS)
def test_a_training_has_the_digest_of_the_cpu(
    devices: str, line: str, references: References
) -> None:
    build.library()
    configuration = parse(line)
    expected = references.once(
        lambda: _result(run_configuration(Here(), configuration.undisturbed)),
        *("simulated", str(configuration.undisturbed)),
    )
    found = run_configuration(OnDevices(*devices.split()), configuration)
    wrong = differences(Outcome(*expected), Outcome(*_result(found)))
    printed = "".join(part.out + part.err for part in found.parts)
    assert not wrong, f"{wrong}\n{printed}"


HEAD = """
import torch, quorate
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1)
    def forward(self, x):
        return self.last(self.drop(self.first(x)))
"""
TRAIN = """
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 6))
trainer = quorate.Trainer(Net(), lambda model, batch: model(batch[0]).square().mean(),
    optimizer=torch.optim.Adam, batch_size=24, shards=4)
trainer.fit(data, epochs=4)
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--devices sim:0+sim:1 --pipeline interleaved", "expected 1f1b, gpipe or zero-bubble on"),
        ("--devices cpu+sim:0", "model: got 'parts on cpu', expected parts on cpu+sim:0"),
        ("--devices sim:0 --precision bf32", "precision: got 'bf32', expected "),
        ("--devices sim:0 --workers 2 --engine collective", "devices: got 'sim:0 for rank 0 and"),
    ],
)
def test_what_devices_cannot_do_is_refused(options: str, said: str, tmp_path: Path) -> None:
    build.library()
    (script := tmp_path / "script.py").write_text(f"{HEAD}{TRAIN}")
    ended = OnDevices().run(["run", *options.split(), str(script)])
    assert ended.code == 2, ended.err
    assert said in ended.err


HANGS = """
import pathlib, sys, threading, time
def loss(model, batch):
    mark = pathlib.Path(sys.argv[1])
    if threading.current_thread().name == "quorate-stage-1" and not mark.exists():
        mark.touch()
        time.sleep(3600)
    return model(batch[0]).square().mean()
"""


def test_a_stage_that_hangs_is_named_and_its_worker_replaced(tmp_path: Path) -> None:
    build.library()
    train = TRAIN.replace("lambda model, batch: model(batch[0]).square().mean()", "loss")
    (script := tmp_path / "script.py").write_text(f"{HEAD}{HANGS}{train}")
    options = ["--engine", "processes", "--workers", "1", "--worker-timeout-s", "5"]
    words = ["run", "--devices", "sim:0+sim:1", *options, str(script), str(tmp_path / "mark")]
    ended = OnDevices().run(words)
    assert ended.code == 0, ended.err
    said = ended.out
    assert re.search(r"no answer for \d+ s in step 0, .* in stage 1 for .*; another is", said), said


HUNGRY = """
import torch, quorate
if hasattr(torch, "sim"):
    torch.sim.limit_memory(1, 64 << 20)
def loss(model, batch):
    kept = [torch.zeros(16 << 20, dtype=torch.uint8, device=batch[0].device) for _ in range(8)]
    return model(batch[0]).square().mean()
data = torch.utils.data.TensorDataset(torch.randn(48, 6))
trainer = quorate.Trainer(torch.nn.Linear(6, 1), loss, optimizer=torch.optim.Adam, batch_size=24,
    shards=4)
trainer.fit(data, epochs=1)
"""


def test_memory_that_runs_out_is_the_devices(tmp_path: Path) -> None:
    build.library()
    (script := tmp_path / "script.py").write_text(HUNGRY)
    ended = OnDevices("sim:1").run(["run", "--devices", "cpu", str(script)])
    assert ended.code == 1
    assert re.search(r"out of memory on sim:1: \d+ MiB free of 64 MiB, this process has", ended.err)


def test_the_benchmark_of_gpus_goes_on_after_a_failure(tmp_path: Path) -> None:
    build.library()
    words = ["--devices", "sim:0,sim:9", "--quick", "--networks", "gpt", "--hows", "eager"]
    words += ["--measurements", "speed,two cards", "--minutes", "9"]
    ended = subprocess.run(
        [sys.executable, str(BENCHMARK), *words, "--json", str(tmp_path / "found")],
        env=environment((0.3, 300, 0)),
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "nothing here is about a GPU" in ended.stdout
    found = json.loads((tmp_path / "found").read_text())
    assert found["left_out"] == []
    cells = {each["contender"]: each for each in found["results"]}
    for contender in ("loop", "quorate"):
        assert cells[contender]["examples_per_s"][0] > 0
        assert cells[contender]["memory_mib"] > 0
    assert "got 'sim:9', expected sim:0 to sim:3" in cells["quorate, towers"]["failed"]


def _result(outcome: Outcome) -> list[object]:
    metrics = [line for line in outcome.metrics if {"loss", "validation"} & line.keys()]
    return [[*outcome.codes[-1:]], outcome.facts, metrics, outcome.said]
