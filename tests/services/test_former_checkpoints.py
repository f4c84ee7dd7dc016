"""Checkpoints of before stay loadable, and a run goes on from one to the same bits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import command, digests, on_a_tower, run

from quorate.replica.digest import digest
from quorate.services.checkpoints import files, tensor_file

FORMER = Path(__file__).parent / "data" / "before-rooms"
SHARDS = ("--shards", "4")


def held(file: Path) -> str:
    """Return the digest of all tensors in a file."""
    return digest(sorted(load_file(file).items()))


def test_a_checkpoint_of_before_is_sound_and_is_resumed(tmp_path: Path) -> None:
    sound = files.find(FORMER)
    assert sound is not None
    assert sound.passed_over == []
    resumed = tmp_path / "resumed"
    shutil.copytree(FORMER, resumed)
    done = run(command("everything.py", options=(*SHARDS, "--run-dir", str(resumed))))
    assert done.code == 0, done.out
    assert "resumed step 10 (epoch 3, 0%)" in done.out
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(FORMER, elsewhere)
    on_a_tower("everything.py", options=(*SHARDS, "--run-dir", str(elsewhere)))
    assert digests(resumed) == digests(elsewhere)
    # A run that was never interrupted, where it still gives the bits that were saved.
    whole = tmp_path / "whole"
    steps = ("--save-every-steps", "10", "--run-dir", str(whole))
    on_a_tower("everything.py", options=(*SHARDS, *steps))
    there = files.checkpoint_of(whole, sound.record["global_step"])
    if all(held(there / name) == held(sound.path / name) for name in sound.record["files"]):
        assert digests(resumed) == digests(whole)


def test_a_digest_without_torch_is_that_of_the_tensors() -> None:
    sound = files.find(FORMER)
    assert sound is not None
    order = sound.record["order"]
    for name in ("model.safetensors", "averaged.safetensors"):
        tensors = load_file(sound.path / name)
        expected = digest((tensor, tensors[tensor]) for tensor in order)
        assert files.digest_of(sound.path, name, order) == expected


@pytest.mark.parametrize("name", sorted(tensor_file.TORCH_NAMES.values()))
def test_a_digest_without_torch_knows_all_dtypes(tmp_path: Path, name: str) -> None:
    tensors = {
        "matrix": torch.arange(6, dtype=torch.uint8).reshape(2, 3).to(getattr(torch, name)),
        "number": torch.ones((), dtype=torch.uint8).to(getattr(torch, name)),
        "nothing": torch.zeros(0, 3).to(getattr(torch, name)),
    }
    save_file(tensors, tmp_path / "file")
    assert files.digest_of(tmp_path, "file", tensors) == digest(tensors.items())


def test_checkpoints_are_checked_without_torch() -> None:
    check = (
        "import sys; from pathlib import Path;"
        "from quorate.services.checkpoints import files;"
        "sound = files.find(Path(sys.argv[1]));"
        "files.digest_of(sound.path, 'model.safetensors', sound.record['order']);"
        "files.listing(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check, str(FORMER)], check=True, timeout=60)
