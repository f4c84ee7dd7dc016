"""Checkpoints that all ranks write: what one process writes, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch.distributed
from support.disks import disk
from support.references import References
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
    """The bytes of a checkpoint's tensor files, but for the checksum of the record in each.

    With them what the record says of the optimizer.
    """
    path = files.checkpoint_of(run_dir, step)
    record = files.check(path, step)
    kept = {name: entry for name, entry in record.items() if name.startswith("optimizer")}
    found = {"record": json.dumps(kept).encode()}
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


def undisturbed(references: References) -> str:
    return digest_in(references.on_a_tower(SCRIPT).out)


@pytest.mark.parametrize(("ranks", "blind"), [(1, ""), (3, ""), (3, "2"), (2, "1")])
def test_each_rank_reads_what_it_owns(
    ranks: int, blind: str, references: References, tmp_path: Path
) -> None:
    """From a checkpoint of a tower, at whose end rank 0 reads all of it: there is nothing to do."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert trained(whole, options=TOWER).code == 0
    shutil.copytree(whole, run_dir)
    shutil.rmtree(files.checkpoint_of(run_dir, 6))
    resumed = trained(run_dir, "nothing", "x", "0", blind, options=on(ranks))
    assert resumed.code == 0, resumed.said
    assert "resumed step 4" in resumed.out
    assert digest_in(resumed.out) == undisturbed(references)
    assert tensors_of(run_dir, 6) == tensors_of(whole, 6)
    for each, options in ((whole, TOWER), (run_dir, on(ranks))):
        more = trained(each, "more", "x", "0", blind, options=options)
        assert more.code == 0, more.said
        assert "nothing to do: 6 of 6 updates are done" in more.out
    for step in (6, 8):
        assert tensors_of(run_dir, step) == tensors_of(whole, step)


# Of a rank, while it saves step 4, the second save.
KILLS = ("outline:2 1", "save:2 1", "write:2 1", "flush:2 1")
KILLS_OF_0 = ("write:4 0", "hash:5 0", "state.json:2 0", "complete:2 0")


@pytest.mark.parametrize("kill", [*KILLS, *KILLS_OF_0])
def test_a_rank_is_killed_in_the_midst_of_a_save(
    kill: str, references: References, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    killed = trained(run_dir, "KILL", *kill.split(), options=on(3))
    assert (tmp_path / "run-happened").exists(), killed.said
    if kill in KILLS:
        assert killed.code == 1, killed.said
        # "by signal 9", or "by the kernel" if a test beside this one ran out of memory meanwhile:
        # the kernel's count of such ends is the machine's.
        assert "quorate: rank 1 was killed by" in killed.err
    newest = files.find(run_dir)
    assert newest is not None
    assert newest.record["global_step"] == 2
    resumed = trained(run_dir, "KILL", *kill.split(), options=on(3))
    assert resumed.code == 0, resumed.said
    assert "resumed step 2" in resumed.out
    assert digest_in(resumed.out) == undisturbed(references)
    whole = tmp_path / "whole"
    assert trained(whole, options=TOWER).code == 0
    assert tensors_of(run_dir, 6) == tensors_of(whole, 6)
    assert not [*(run_dir / "checkpoints").glob(".*")]


@pytest.mark.parametrize("moment", ["write:2 1", "flush:2 1", "flush:2 2"])
def test_a_rank_that_cannot_write_is_named_and_training_goes_on(
    moment: str, references: References, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ended = trained(run_dir, "full", *moment.split(), options=on(3))
    assert ended.code == 0, ended.said
    assert re.search(
        rf"step 4 was not saved, training continues: .*rank {moment[-1]} on {os.uname().nodename}: "
        r"No space left on device, in a checkpoint of [0-9,]+ bytes: '.*/checkpoints/",
        ended.out,
    ), ended.out
    assert "step 6 was saved: checkpoints can be written again" in ended.out
    assert [path.name for path, _ in files.newest_first(run_dir)] == [
        files.checkpoint_of(run_dir, step).name for step in (6, 2)
    ]
    assert digest_in(ended.out) == undisturbed(references)


def test_a_disk_that_is_full_costs_no_checkpoint(references: References, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert trained(whole, options=TOWER).code == 0
    nbytes = sum(f.stat().st_size for f in files.checkpoint_of(whole, 6).iterdir())
    with disk(tmp_path / "disk", str(nbytes * 3 // 2)) as place:
        run_dir = place / "run"
        ended = trained(run_dir, options=on(3))
        assert ended.code == 1, ended.said
        assert "step 4 was not saved, training continues: " in ended.out
        assert "No space left on device" in ended.out
        assert [step for _, step in files.newest_first(run_dir)] == [2]
        more = ["mount", "-o", f"remount,size={nbytes * 5}", str(place)]
        subprocess.run(more, check=True)
        resumed = trained(run_dir, options=on(2))
        assert resumed.code == 0, resumed.said
        assert "resumed step 2" in resumed.out
        assert digest_in(resumed.out) == undisturbed(references)
        assert tensors_of(run_dir, 6) == tensors_of(whole, 6)


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes another user's place")
def test_a_rank_that_may_not_write_has_rank_0_write_for_it(
    references: References, tmp_path: Path
) -> None:
    ended = trained(tmp_path / "run", "deny", "x", "1", options=on(3))
    assert ended.code == 0, ended.said
    said = [line for line in ended.out.splitlines() if "in each checkpoint" in line]
    assert len(said) == 1, ended.out
    assert f"rank 1 on {os.uname().nodename} cannot write there: Permission denied" in said[0]
    assert digest_in(ended.out) == undisturbed(references)
    assert files.find(tmp_path / "run") is not None
