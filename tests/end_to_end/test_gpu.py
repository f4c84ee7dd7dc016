"""Questions for a GPU alone. Run if torch sees a GPU: ``python -m pytest -m gpu``.

The simulated accelerator runs this file too, except for CUDA's parts: see ``tests/accelerator``.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest_of
from support.fits import fit, rows
from support.references import References
from support.runs import digests
from support.scenarios import Here, Scenario, check
from support.trainings.configuration import parse
from support.warm import WARM
from support.warm_child import WarmRuns
from torch import nn
from torch.utils.data import TensorDataset

import quorate

pytestmark = pytest.mark.gpu

KIND = getattr(torch.accelerator.current_accelerator(), "type", "cuda")
DEVICE = f"{KIND}:0"
ON_CUDA = KIND == "cuda"
SCRIPT = Path(__file__).parents[1] / "scripts" / "on_gpu.py"
LIMIT_S = 300


def run(*words: str, code: int = 0, **environment: str) -> str:
    """Return the output of the command."""
    found, out, err = WARM.run(words, {**os.environ, **environment}, LIMIT_S)
    assert found == code, (found, out, err)
    return out + err


def trained(engine: str, workers: int, how: str, *options: str, code: int = 0, **env: str) -> str:
    """Return the output of a run of the script."""
    words = ("run", "--devices", DEVICE, "--engine", engine, "--workers", str(workers), *options)
    return run(*words, str(SCRIPT), how, code=code, **env)


# --- same bits ------------------------------------------------------------------------------------

CONVOLUTION = "model=convolution optimizer=adam options=ema+clip data=augmented"
LINES = [
    f"{CONVOLUTION} engine=towers:4",
    "model=convolution options=bf16 engine=towers:2",
    "model=convolution options=fp16 engine=processes:2",
    "model=convolution options=compiled engine=towers:2",
    f"{CONVOLUTION} engine=processes:2 steps=16 pause=10 fault=kill@forward+kill@backward",
]
if ON_CUDA:  # ``test_on_devices`` has the like on simulated devices
    LINES += [
        *(f"{CONVOLUTION} engine={engine}" for engine in ("towers:2", "processes:1")),
        *(f"model=convolution options=tf32 engine={e}" for e in ("towers:2", "processes:2")),
        "model=convolution options=bf16 engine=processes:2",
        "model=convolution options=fp16 engine=towers:2",
        f"{CONVOLUTION} engine=towers:2 event=resume then=inline",
        f"{CONVOLUTION} engine=processes:2 event=resume then=processes:1",
        # Two stages share the GPU: each has a separate queue, and both share the generator of the
        # GPU, the source of dropout's numbers.
        "model=transformer optimizer=adam engine=stages",
        "model=mlp optimizer=adam engine=stages:2",
    ]


@pytest.mark.parametrize("line", LINES)
def test_same_bits_as_one_worker_on_the_device(line: str, references: References) -> None:
    parts = len(parse(line).engines)
    check(Scenario(line, codes=(0,) * parts), references, Here(DEVICE))


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="it takes two GPUs")
@pytest.mark.parametrize("cut", ["--split second", "--split second --pipeline zero-bubble"])
def test_stages_give_the_bits_of_one_piece(cut: str, tmp_path: Path) -> None:
    stages = (
        "--devices",
        f"{KIND}:0+{KIND}:1",
        *cut.split(),
        "--run-dir",
        str(tmp_path / "stages"),
    )
    trained("processes", 1, "clean", *stages)
    trained("towers", 1, "clean", "--run-dir", str(tmp_path / "whole"))
    assert digests(tmp_path / "stages") == digests(tmp_path / "whole")


def test_dropout_is_the_shards_own() -> None:
    class Disturbs(quorate.Callback):
        def updated(self, report: quorate.Report) -> None:
            torch.rand(100, device=DEVICE)  # draws by other code do not count

    def weights(seed: int, *callbacks: quorate.Callback) -> str:
        def net() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1))

        settings = {"steps": 3, "ema_decay": 0.9, "engine": "towers", "workers": 2, "seed": seed}
        data = rows(64, inputs=8)
        return digest_of(fit(net, data=data, callbacks=callbacks, devices=DEVICE, **settings))

    assert weights(1) == weights(1, Disturbs())
    assert weights(1) != weights(2)


# --- precision ------------------------------------------------------------------------------------


ONE = {"devices": DEVICE, "workers": 1, "engine": "towers", "steps": 1}


def test_an_overflow_in_float16_costs_nothing() -> None:
    # The derivative is 512 for each row. Times the first scale the value is above 65,504.
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() * 32).mean()

    data = TensorDataset(torch.full((4, 1), 16.0))
    plain = {"optimizer": lambda params: torch.optim.SGD(params, lr=1.0), "batch_size": 4}
    trainer = fit(model, loss, data, shards=2, precision="fp16", **plain, **ONE)
    assert trainer.model.weight.dtype == torch.float32
    assert trainer.model.weight.item() == 1 - 512


def test_float32_is_float32() -> None:
    # 1 + 2**-12 has more bits than TensorFloat-32, whose product would be 1.
    value = 1 + 2.0**-12
    seen = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch[0])
        seen.append(out.detach()[0, 0].item())
        return out.mean() * 0

    model = nn.Linear(32, 32, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.data[0, 0] = value
    ones = torch.zeros(64, 32)
    ones[:, 0] = 1.0
    torch.set_float32_matmul_precision("high")
    try:
        fit(model, loss, TensorDataset(ones), batch_size=64, shards=1, **ONE)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {value}


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "workers"), [("towers", 1), ("processes", 4)])
def test_a_memory_fraction_is_held(engine: str, workers: int) -> None:
    trained(engine, workers, "held", "--memory-fraction", "0.2", ON_GPU_FRACTION="0.2")
    said = trained(engine, 1, "big", "--memory-fraction", "0.1", code=1)
    assert f"quorate: out of memory on {DEVICE}" in said
    assert "(memory_fraction)" in said
    assert "a larger memory_fraction" in said


# --- messages -------------------------------------------------------------------------------------

VERIFY = ("--devices", DEVICE, "--engine", "towers", "--workers", "1,2", "--updates", "2")


def test_verify_names_an_operator_that_adds_with_atomics(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    verify = WarmRuns("verify", monkeypatch, capfd)
    if ON_CUDA:
        said = verify(*VERIFY, str(SCRIPT), "--", "atomics", code=1)
        assert "aten.index_add" in said
        assert "returned different results for the same inputs" in said
        assert "on_gpu.py:" in said
    assert "same bits on 1 worker, 2 workers" in verify(*VERIFY, str(SCRIPT), "clean", code=0)


@pytest.mark.skipif(not ON_CUDA, reason="its identity is NVIDIA's")
def test_a_run_says_which_gpu_it_is() -> None:
    said = trained("towers", 1, "clean").splitlines()
    (line,) = [line for line in said if line.startswith(f"{DEVICE} = physical ")]
    assert "GPU-" in line or "MIG-" in line


def test_the_doctor_says_that_it_computes() -> None:
    found = json.loads(run("doctor", "--json", "--devices", DEVICE, "--workers", "1"))
    assert found["works"]
    assert len(found["accelerators"]) == torch.accelerator.device_count()
    first = found["accelerators"][0]
    assert first["device"] == DEVICE
    assert first["error"] is None
    if ON_CUDA:
        assert found["driver"]["version"]
        assert found["torch"]["cuda"] == torch.version.cuda
        assert first["visible"]["uuid"] in json.dumps(found["gpus"])


def test_the_log_of_placement_names_the_device() -> None:
    said = trained("towers", 1, "clean", "--log-placement")
    assert re.search(rf"dropout +Dropout +native_dropout +{DEVICE} +1\n", said), said
    assert re.search(rf"native_dropout_backward +{DEVICE} +1\n", said), said


# --- batches --------------------------------------------------------------------------------------


def test_batches_are_moved() -> None:
    """Move tensors in any container; pin memory if the device has use for pinned memory."""
    dicts = [{"x": [torch.tensor([1.0 * n]), n], "name": str(n)} for n in range(8)]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        x, numbers = batch["x"]
        assert x.device == numbers.device == torch.device(DEVICE)
        assert x.flatten().tolist() == numbers.tolist() == [float(name) for name in batch["name"]]
        return model(x).square().mean()

    fit(nn.Linear(1, 1), loss, dicts, batch_size=4, shards=2, devices=DEVICE, engine="towers")


@pytest.fixture(autouse=True)
def nothing_stays_on_the_device() -> Iterator[None]:
    yield
    torch.accelerator.empty_cache()
