"""Trainings on simulated devices: one digest each, that of the CPU, on any number of them.

Streams run late, and whatever no wait orders raises: the digests are not equal by luck.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1)
"""
TRAIN = """
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 6))
trainer = quorate.Trainer(Net(), lambda model, batch: model(batch[0]).square().mean(),
    optimizer=torch.optim.Adam, batch_size=24, shards=4)
trainer.fit(data, epochs=4)
"""
FORWARDS = {
    "means its own device by a name without a number": """
    def part(self, x):
        assert x.device in (torch.empty(1, device=x.device.type).device, torch.device("cpu"))
        return self.drop(self.first(x)).tanh()
    def forward(self, x):
        return self.last(checkpoint(self.part, x, use_reentrant=False))
""",
    "draws on the host, whatever is in the device's generator": """
    def part(self, x):
        return self.drop(self.first(x)).tanh() + 0.01 * torch.randn_like(x[:, :1])
    def forward(self, x):
        if x.device.type != "cpu":
            torch.get_device_module(x.device).manual_seed(3)
        x = checkpoint(self.part, x, use_reentrant=False)
        return self.last(self.drop(x))
""",
    "seeds all devices": """
    def forward(self, x):
        x = self.drop(self.first(x))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            x = x + 0.01 * torch.randn(x.shape, device=x.device)
        torch.manual_seed(8)
        return self.last(self.drop(x))
""",
    "calls a module of a Shared": """
        self.values = quorate.Shared("values", teacher=nn.Linear(8, 8).eval())
    def forward(self, x):
        return self.last(self.values.teacher(self.drop(self.first(x))))
""",
    "reads a Shared once more in autograd's thread of the device": """
        self.values = quorate.Shared("values", scale=torch.arange(8.0))
    def part(self, x):
        return self.drop(self.first(x)).tanh() * self.values.scale
    def forward(self, x):
        return self.last(checkpoint(self.part, x, use_reentrant=False))
""",
    "leaves autocast of the device on": """
    def forward(self, x):
        x = self.last(self.drop(self.first(x)))
        torch.set_autocast_dtype(x.device.type, torch.bfloat16)
        torch.set_autocast_enabled(x.device.type, True)
        return x
""",
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=list(FORWARDS))
def test_towers_on_several_devices_do_not_disturb_each_other(forward: str, tmp_path: Path) -> None:
    build.library()
    (script := tmp_path / "script.py").write_text(HEAD + forward + TRAIN)
    several = OnDevices(*(f"sim:{number}" for number in range(3)), delays=(0.5, 2000, 0))
    words = ["cpu", *(["--random", "host"] if "manual_seed(3)" in forward else [])]
    expected = _digest(Here(), script, *words)
    assert _digest(OnDevices("sim:1"), script, *words) == expected
    assert _digest(several, script, *words) == expected


IN_STAGES = {
    "asks where a value lies": """
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(8))
    def forward(self, x):
        hidden = self.first(x)
        if hidden.device.type != x.device.type or not (x.is_cpu or x.is_sim):
            hidden = hidden * 2
        low = self.last(self.drop(hidden))
        with torch.autocast(low.device.type, enabled=False):
            return low + torch.arange(1, device=low.device) + torch.zeros(1).to(low.device.type)
""",
    "has functions in checkpoints": """
        self.scale = nn.Parameter(torch.ones(8))
        self.register_forward_hook(lambda _, inputs, output: output * 2)
    def lower(self, x):
        return self.drop(self.first(x)).tanh()
    def forward(self, x):
        x = checkpoint(self.lower, x, use_reentrant=False)
        low, drops = self.last(x), [self.drop]
        return checkpoint(lambda a, b: drops[0](a * b * self.scale), low, x, use_reentrant=True)
""",
    "has a checkpoint in the module after the cut": """
        self.last = Upper()
    def forward(self, x):
        return self.last(self.drop(self.first(x)))
class Upper(nn.Module):
    def __init__(self):
        super().__init__()
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
    def part(self, x):
        return torch.dropout(self.middle(x), 0.3, self.training).tanh()
    def forward(self, x):
        return self.last(checkpoint(self.part, x, use_reentrant=False))
""",
}


@pytest.mark.parametrize("forward", IN_STAGES.values(), ids=list(IN_STAGES))
def test_a_model_in_stages_has_the_bits_of_one_piece(forward: str, tmp_path: Path) -> None:
    build.library()
    (script := tmp_path / "script.py").write_text(HEAD + forward + TRAIN)
    stages = "cpu+cpu", "--split", "last"
    in_threads = _digest(OnDevices("sim:0", "sim:1"), script, *stages)
    assert in_threads == _digest(Here(), script, "cpu") == _digest(Here(), script, *stages)


APART = """
        self.values = quorate.Shared("values", step=0)
    def part(self, x, step):
        assert self.values.step == step
        return self.drop(self.first(x)).tanh()
    def forward(self, x):
        return self.last(checkpoint(self.part, x, self.values.step, use_reentrant=False))
torch.manual_seed(0)
model, data = Net(), torch.utils.data.TensorDataset(torch.randn(48, 6))
trainer = quorate.Trainer(model, lambda model, batch: model(batch[0]).square().mean(),
    optimizer=torch.optim.Adam, batch_size=4, update="async")
for report in trainer.updates(data, epochs=4):
    model.values.step = report.global_step
"""


def test_towers_on_one_device_read_their_own_shared(tmp_path: Path) -> None:
    """Of another step each: in autograd's thread of the device too."""
    build.library()
    (script := tmp_path / "script.py").write_text(HEAD + APART)
    ended = OnDevices("sim:0", "sim:0").run(["run", "--devices", "cpu", str(script)])
    assert ended.code == 0, ended.out + ended.err


SPREAD = """
import sys, torch, quorate
from torch import nn
class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        one, other = sys.argv[1:]
        self.lower = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()).to(one)
        self.upper = nn.Linear(8, 1).to(other)
        self.upper.register_buffer("shift", torch.ones(1, device=other))
    def forward(self, x):
        there = self.upper.weight.device
        assert x.device == self.lower[0].weight.device
        return self.upper(self.lower(x).to(there)) + self.upper.shift
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 6))
trainer = quorate.Trainer(TwoParts, lambda model, batch: model(batch[0]).square().mean(),
    optimizer=torch.optim.Adam, batch_size=24, shards=4)
trainer.fit(data, epochs=4)
assert {tensor.device.type for tensor in trainer.model.state_dict().values()} == {"cpu"}
"""


def test_a_model_that_is_spread_gives_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    build.library()
    (script := tmp_path / "script.py").write_text(SPREAD)
    digests = {
        _digest(OnDevices(), script, devices, "--engine", "towers", parts=parts)
        for devices, *parts in (
            ("cpu", "cpu", "cpu"),
            ("sim:0+sim:1", "sim:0", "sim:1"),
            ("cpu+sim:1,sim:1+cpu", "cpu", "sim:1"),
        )
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--devices sim:0+sim:1 --pipeline interleaved", "expected 1f1b, gpipe or zero-bubble on"),
        ("--devices cpu+sim:0", "model: got 'parts on cpu', expected parts on cpu+sim:0"),
        ("--devices sim:0 --precision bf32", "precision: got 'bf32', expected "),
    ],
)
def test_what_devices_cannot_do_is_refused(options: str, said: str, tmp_path: Path) -> None:
    build.library()
    (script := tmp_path / "script.py").write_text(f"{HEAD}{FORWARDS['seeds all devices']}{TRAIN}")
    ended = OnDevices().run(["run", *options.split(), str(script)])
    assert ended.code == 2, ended.err
    assert said in ended.err


PLAIN = """
    def forward(self, x):
        return self.last(self.drop(self.first(x)))
"""
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
    (script := tmp_path / "script.py").write_text(f"{HEAD}{PLAIN}{HANGS}{train}")
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
    speed, cards = "speed gpt eager", "two cards gpt eager"
    cells: dict[str, dict[str, Any]] = {}
    for minutes, left_out in (("0.1", [speed, cards]), ("3", [])):
        words = ["--devices", "sim:0,sim:9", "--quick", "--networks", "gpt", "--hows", "eager"]
        words += ["--measurements", "speed,two cards", "--minutes", minutes]
        ended = subprocess.run(
            [sys.executable, str(BENCHMARK), *words, "--json", str(tmp_path / "found")],
            env=environment((0.3, 300, 0)),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert "nothing here is about a GPU" in ended.stdout
        found = json.loads((tmp_path / "found").read_text())
        assert found["left_out"] == left_out
        cells = {each["contender"]: each for each in found["results"]}
        assert bool(cells) == (not left_out)
    for contender in ("loop", "quorate"):
        assert cells[contender]["examples_per_s"][0] > 0
        assert cells[contender]["memory_mib"] > 0
    assert "got 'sim:9', expected sim:0 to sim:3" in cells["quorate, towers"]["failed"]


def _digest(tree: Here | OnDevices, script: Path, *words: str, parts: Sequence[str] = ()) -> str:
    """Run a script with ``--devices`` and more words; return the digest of what it trained."""
    run_dir = tempfile.mkdtemp(dir=script.parent)
    ended = tree.run(["run", "--devices", *words, "--run-dir", run_dir, str(script), *parts])
    assert ended.code == 0, ended.err
    inspected = json.loads(tree.run(["inspect", "--json", run_dir]).out)
    assert inspected["global_step"] == 8
    return str(inspected["digest"])


def _result(outcome: Outcome) -> list[object]:
    metrics = [line for line in outcome.metrics if {"loss", "validation"} & line.keys()]
    return [[*outcome.codes[-1:]], outcome.facts, metrics, outcome.said]
