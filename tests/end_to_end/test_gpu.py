"""What only a GPU can answer. Runs where torch sees one: ``python -m pytest -m gpu``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.warm import WARM
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.replica.transfer import move

pytestmark = pytest.mark.gpu

# For a trial of these tests without a GPU: "cpu", and no mark.
DEVICE = "cuda:0"
ON_CUDA = DEVICE != "cpu"
SCRIPT = Path(__file__).parents[1] / "scripts" / "on_gpu.py"
STEPS = 6
LIMIT_S = 300


def run(*words: str, code: int = 0, **environment: str) -> tuple[str, str]:
    """Output and errors of the command."""
    found, out, err = WARM.run(words, {**os.environ, **environment}, LIMIT_S)
    assert found == code, (found, out, err)
    return out, err


def trained(
    folder: Path, engine: str, workers: int, *options: str, steps: int = STEPS, how: str = "clean",
    **environment: str,
) -> tuple[str, str]:  # fmt: skip
    """The digest of a run, and what it said."""
    words = ("--engine", engine, "--workers", str(workers), "--run-dir", str(folder), *options)
    said = "".join(
        run("run", "--devices", DEVICE, *words, str(SCRIPT), str(steps), how, **environment)
    )
    out, _ = run("inspect", str(folder), "--json")
    found = json.loads(out)
    assert found["global_step"] == steps
    return found["digest"], said


# --- same bits ------------------------------------------------------------------------------------

PRECISIONS = ["fp32", "tf32", "bf16", "fp16"] if ON_CUDA else ["fp32", "bf16"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_bits_on_any_number_of_workers_on_one_device(tmp_path: Path, precision: str) -> None:
    ways = [("towers", 1), ("towers", 2), ("towers", 4), ("processes", 1), ("processes", 2)]
    found = {
        (engine, workers): trained(
            tmp_path / f"{engine}{workers}", engine, workers, "--precision", precision
        )[0]
        for engine, workers in ways
    }
    assert len(set(found.values())) == 1, found


def test_same_bits_compiled(tmp_path: Path) -> None:
    found = [
        trained(tmp_path / f"{n}", "towers", n, "--compile", steps=3)[0] for n in (1, 2)
    ]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize("engine", ["towers", "processes"])
def test_a_resume_on_another_number_of_workers(tmp_path: Path, engine: str) -> None:
    whole, _ = trained(tmp_path / "whole", engine, 2)
    trained(tmp_path / "halves", engine, 2, steps=STEPS // 2)
    resumed, said = trained(tmp_path / "halves", engine, 1)
    assert f"resumed step {STEPS // 2}" in said
    assert resumed == whole


def test_a_worker_that_is_killed_on_the_gpu_changes_no_bit(tmp_path: Path) -> None:
    flag = tmp_path / "killed"
    whole, _ = trained(tmp_path / "whole", "processes", 1)
    again, said = trained(
        tmp_path / "again", "processes", 2, how="killed", ON_GPU_KILLED=str(flag)
    )  # fmt: skip
    assert flag.exists()
    assert "was killed by signal 9 (SIGKILL)" in said
    assert again == whole


def test_dropout_is_the_shards_own() -> None:
    def weights(seed: int, *, disturbed: bool = False) -> str:
        trainer = quorate.Trainer(
            lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1)),
            lambda model, batch: model(batch[0]).square().mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            batch_size=16, shards=4, devices=DEVICE,
            workers=quorate.Workers(2, engine="towers"), seed=seed,
        )  # fmt: skip
        for _ in trainer.updates(TensorDataset(ROWS), steps=3):
            if disturbed:  # what others draw from the device's generator does not count
                torch.rand(100, device=DEVICE)
        return digest(trainer.model.state_dict().items())

    assert weights(1) == weights(1, disturbed=True)
    assert weights(1) != weights(2)


ROWS = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))


# --- stages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["towers", "processes"])
@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", "interleaved"])
def test_stages_that_are_threads_give_the_bits_of_one_piece(
    tmp_path: Path, engine: str, pipeline: str
) -> None:
    # Two stages share the GPU: each has a queue of its own, and they share its generator, from
    # which dropout draws. Of two GPUs: --devices cuda:0+cuda:1, where there are two.
    split = ("norm,second,last" if pipeline == "interleaved" else "second", "--pipeline", pipeline)
    staged, said = trained(
        *(tmp_path / "stages", engine, 1, "--devices", f"{DEVICE}+{DEVICE}", "--split", *split)
    )
    whole, _ = trained(tmp_path / "whole", engine, 1)
    assert "stages: the model is cut before" in said
    assert staged == whole


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="it takes two GPUs"
)
def test_stages_on_two_gpus_give_the_bits_of_one(tmp_path: Path) -> None:
    devices = ("--devices", "cuda:0+cuda:1", "--split", "second")
    staged, _ = trained(tmp_path / "stages", "processes", 1, *devices)
    assert staged == trained(tmp_path / "whole", "processes", 1)[0]


# --- precision ------------------------------------------------------------------------------------


def test_an_overflow_in_float16_costs_nothing() -> None:
    # The derivative is 512 for each row. Times the first scale it is above 65,504.
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    trainer = quorate.Trainer(
        model,
        lambda model, batch: (model(batch[0]).float() * 32).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        batch_size=4, shards=2, devices=DEVICE,
        workers=quorate.Workers(1, engine="towers"), precision="fp16",
    )  # fmt: skip
    for _ in trainer.updates(TensorDataset(torch.full((4, 1), 16.0)), steps=1):
        pass
    assert trainer.model.weight.dtype == torch.float32
    assert trainer.model.weight.item() == 1 - 512


def test_float32_is_float32() -> None:
    # 1 + 2**-12 has more bits than TensorFloat-32, whose product would be 1.
    value = 1 + 2.0**-12
    seen = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        seen.append(model(batch[0]).detach()[0, 0].item())
        found: torch.Tensor = model(batch[0]).mean()
        return found

    model = nn.Linear(32, 32, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.data[0, 0] = value
    rows = torch.zeros(64, 32)
    rows[:, 0] = 1.0
    trainer = quorate.Trainer(
        model, loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        batch_size=64, shards=1, devices=DEVICE,
        workers=quorate.Workers(1, engine="towers"), )  # fmt: skip
    torch.set_float32_matmul_precision("high")
    try:
        for _ in trainer.updates(TensorDataset(rows), steps=1):
            pass
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {value}


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "workers"), [("towers", 1), ("processes", 1), ("processes", 4)])
def test_a_memory_fraction_is_held(tmp_path: Path, engine: str, workers: int) -> None:
    fraction = "0.2"
    options = ("--memory-fraction", fraction)
    trained(
        tmp_path, engine, workers, *options, how="held", ON_GPU_FRACTION=fraction
    )  # fmt: skip


@pytest.mark.skipif(not ON_CUDA, reason="a CPU has no bound")
@pytest.mark.parametrize("engine", ["towers", "processes"])
def test_more_than_the_fraction_is_out_of_memory(tmp_path: Path, engine: str) -> None:
    words = ("--devices", DEVICE, "--engine", engine, "--workers", "1", "--run-dir", str(tmp_path))
    out, err = run("run", *words, "--memory-fraction", "0.1", str(SCRIPT), "2", "big", code=1)
    said = out + err
    assert f"quorate: out of memory on {DEVICE}" in said
    assert "(memory_fraction)" in said
    assert "a larger memory_fraction" in said


# --- what is said ---------------------------------------------------------------------------------


def test_verify_names_an_operator_that_adds_with_atomics() -> None:
    words = ("--devices", DEVICE, "--engine", "towers", "--workers", "1,2", "--updates", "2")
    out, _ = run("verify", *words, str(SCRIPT), "--", "4", "atomics", code=1 if ON_CUDA else 0)
    if ON_CUDA:
        assert "aten.index_add" in out
        assert "returned different results for the same inputs" in out
        assert "on_gpu.py:" in out


def test_verify_finds_nothing_in_what_is_repeatable() -> None:
    words = ("--devices", DEVICE, "--engine", "towers", "--workers", "1,2", "--updates", "2")
    out, _ = run("verify", *words, str(SCRIPT), "--", "4", "clean")
    assert "same bits on 1 worker and 2 workers" in out


@pytest.mark.skipif(not ON_CUDA, reason="a CPU has no number of the driver's")
def test_a_run_says_which_gpu_it_is(tmp_path: Path) -> None:
    _, said = trained(tmp_path, "towers", 1, steps=1)
    (line,) = [line for line in said.splitlines() if line.startswith(f"{DEVICE} = physical ")]
    assert "GPU-" in line or "MIG-" in line


@pytest.mark.skipif(not ON_CUDA, reason="a CPU is no accelerator")
def test_the_doctor_sees_the_gpu_and_that_it_computes() -> None:
    out, _ = run("doctor", "--json", "--devices", DEVICE, "--workers", "1")
    found = json.loads(out)
    assert found["works"]
    assert found["driver"]["version"]
    assert found["torch"]["cuda"] == torch.version.cuda
    assert len(found["accelerators"]) == torch.cuda.device_count()
    first = found["accelerators"][0]
    assert first["device"] == DEVICE
    assert first["error"] is None
    assert first["visible"]["uuid"] in json.dumps(found["gpus"])
    table, _ = run("doctor", "--devices", DEVICE, "--workers", "1")
    assert f"{DEVICE} = physical" in " ".join(table.split())


# --- batches --------------------------------------------------------------------------------------


def test_batches_are_moved() -> None:
    device = torch.device(DEVICE)
    pinned = torch.arange(6.0).pin_memory() if ON_CUDA else torch.arange(6.0)
    batch = {"x": [pinned, torch.arange(3)], "names": ("a", "b"), "n": 7}
    moved = move(batch, device)
    assert moved["x"][0].device == moved["x"][1].device == device
    assert torch.equal(moved["x"][0].cpu(), pinned)
    assert (moved["names"], moved["n"]) == (("a", "b"), 7)
    assert batch["x"][0] is pinned


@pytest.fixture(autouse=True)
def nothing_stays_on_the_device() -> Iterator[None]:
    yield
    if ON_CUDA:
        torch.cuda.empty_cache()
