"""Checkpoints that all ranks write: what one process writes, whatever happens meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed
from support.runs import TOWER, Ended, command, run

from quorate.services.checkpoints import files, tensor_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked"),
]
SCRIPT = "saved_by_ranks.py"
STEPS = (2, 4, 6)


def trained(
    run_dir: Path, *words: str, options: tuple[str, ...], env: dict[str, str] | None = None
) -> Ended:
    run_dir.parent.mkdir(exist_ok=True)
    env = {"HAPPENED": str(run_dir.parent / f"{run_dir.name}-happened"), **(env or {})}
    return run(command(SCRIPT, *words, options=(*options, "--run-dir", str(run_dir))), env)


def on(ranks: int) -> tuple[str, ...]:
    return ("--engine", "collective", "--workers", str(ranks))


def tensors_of(run_dir: Path, step: int) -> dict[str, bytes]:
    """The bytes of a checkpoint's tensor files, but for the checksum of the record in each."""
    path = files.checkpoint_of(run_dir, step)
    assert files.check(path, step)["global_step"] == step
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        bound = tensor_file.header(file).metadata[files.RECORD_SHA256]
        found[file.name] = file.read_bytes().replace(bound.encode(), b"")
    return found


def digest_in(said: str) -> str:
    (line,) = re.findall(r"^digest (\w+)$", said, re.MULTILINE)
    return str(line)


WAYS = {
    "1 rank": (on(1), (), {}),
    "2 ranks": (on(2), (), {}),
    "3 ranks": (on(3), (), {}),
    "small buckets": ((*on(3), "--bucket-mb", "0.25"), (), {}),
    "one that does not see the directory": (on(3), ("nothing", "x", "0", "1"), {}),
    "nobody sees it": (on(3), ("nothing", "x", "0", "12"), {}),
    "gathered": (on(2), (), {"GATHERED": "1"}),
    "not sharded": ((*on(2), "--no-shard-optimizer"), (), {}),
}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_files_of_one_process(optimizer: str, tmp_path: Path) -> None:
    env = {"OPTIMIZER": optimizer}
    reference = tmp_path / "tower"
    ended = trained(reference, options=TOWER, env=env)
    assert ended.code == 0, ended.said
    expected = {step: tensors_of(reference, step) for step in STEPS}
    for name, (options, words, more) in WAYS.items():
        if optimizer == "sgd" and name not in ("3 ranks", "one that does not see the directory"):
            continue
        run_dir = tmp_path / name.replace(" ", "-")
        got = trained(run_dir, *words, options=options, env={**env, **more})
        assert got.code == 0, got.said
        assert digest_in(got.out) == digest_in(ended.out), name
        for step in STEPS:
            assert tensors_of(run_dir, step) == expected[step], (name, step)
        seen = [rank for rank in "12" if f"rank {rank} does not see it" in got.out]
        assert seen == [*(words[3] if words else "")], got.said
        assert not [*(run_dir / "checkpoints").glob(".*")]
