"""Checkpoints written by all ranks: the bytes of a single process, whatever happens meanwhile."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed
from support.runs import TOWER, Ended, command, inspected, run, torchrun

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked"),
]
STEPS = (2, 4, 6)
SAVES = ("--save-every-steps", "2", "--keep", "9", "--run-dir")
HOST = os.uname().nodename


def on(ranks: int) -> tuple[str, ...]:
    return ("--engine", "collective", "--workers", str(ranks))


def words_of(run_dir: Path, *words: str, options: tuple[str, ...]) -> list[str]:
    notes = run_dir.parent / "notes"
    notes.mkdir(exist_ok=True)
    size = options[options.index("--workers") + 1] if options else "3"
    more = ("steps=6", "saves=all", f"folder={notes}", f"size={size}", *words)
    return command("ranks.py", *more, options=(*options, *SAVES, str(run_dir)))


def trained(run_dir: Path, *words: str, options: tuple[str, ...]) -> Ended:
    return run(words_of(run_dir, *words, options=options))


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:012}"


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


def files_of(run_dir: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of a checkpoint's tensor files, without the checksum of the record in each.

    The record's entries on the optimizer are included.
    """
    path = checkpoint(run_dir, step)
    record = json.loads((path / "state.json").read_text())
    kept = {name: entry for name, entry in record.items() if name.startswith("optimizer")}
    found = {"record": json.dumps(kept).encode()}
    for file in sorted(path.glob("*.safetensors")):
        found[file.name] = re.sub(rb'"[0-9a-f]{64}"', b'""', file.read_bytes(), count=1)
    assert len(found) >= 3
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory written by a single process."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    ended = trained(run_dir, options=TOWER)
    assert ended.code == 0, ended.said
    return run_dir


def is_as_whole(run_dir: Path, whole: Path, steps: tuple[int, ...] = STEPS) -> None:
    for step in steps:
        assert files_of(run_dir, step) == files_of(whole, step), step
    assert not [*(run_dir / "checkpoints").glob(".*")]
    assert inspected(run_dir)["digest"] == inspected(whole)["digest"]


@pytest.mark.slow
def test_the_files_of_one_process(whole: Path, tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", options=(*on(2), "--no-shard-optimizer"))
    assert ended.code == 0, ended.said
    is_as_whole(tmp_path / "run", whole)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "several"])
def test_the_files_of_one_process_of_groups_with_momentum(optimizer: str, tmp_path: Path) -> None:
    for name, options in (("tower", TOWER), ("ranks", (*on(3), "--bucket-mb", "0.25"))):
        ended = trained(tmp_path / name, f"optimizer={optimizer}", options=options)
        assert ended.code == 0, ended.said
    is_as_whole(tmp_path / "ranks", tmp_path / "tower")
    for name, options in (("tower", on(2)), ("ranks", TOWER)):  # read by others
        shutil.rmtree(checkpoint(tmp_path / name, 6))
        ended = trained(tmp_path / name, f"optimizer={optimizer}", options=options)
        assert "resumed step 4" in ended.out, ended.said
    is_as_whole(tmp_path / "ranks", tmp_path / "tower")


def mounted(ranks: int, how: str, words: list[str]) -> list[str]:
    """Return torchrun's command line of ranks; some ranks have a different folder mounted there."""
    line = f'{how}; exec "$@"'
    start = ["unshare", "--mount", "--propagation", "private", "sh", "-c", line, "sh"]
    return torchrun(ranks, "--no-python", *start, sys.executable, *words[1:])


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="it mounts")
def test_rank_0_reads_and_writes_for_those_who_cannot(whole: Path, tmp_path: Path) -> None:
    """Rank 1 does not see the run directory, and rank 2 may not write there."""
    shutil.copytree(whole, run_dir := tmp_path / "run")
    shutil.rmtree(checkpoint(run_dir, 6))
    place = run_dir / "checkpoints"
    how = (
        f"case $RANK in 1) mount -t tmpfs tmpfs {run_dir} ;; "
        f"2) mount --bind {place} {place} && mount -o remount,bind,ro {place} ;; esac"
    )
    ended = run(mounted(3, how, words_of(run_dir, options=())))
    assert ended.code == 0, ended.said
    assert "resumed step 4" in ended.out
    assert f"rank 1 on {HOST} does not see it" in ended.out
    assert f"rank 2 on {HOST} cannot write there: Read-only file system" in ended.out
    is_as_whole(run_dir, whole)


@pytest.mark.slow
def test_each_rank_reads_what_it_owns_and_goes_on_after_the_end(
    whole: Path, tmp_path: Path
) -> None:
    """Resume a tower's checkpoint; at the end rank 0 reads the whole: there is nothing to do."""
    runs = {"ranks": (tmp_path / "run", on(3)), "tower": (tmp_path / "tower", TOWER)}
    for run_dir, _ in runs.values():
        shutil.copytree(whole, run_dir)
    shutil.rmtree(checkpoint(tmp_path / "run", 6))
    resumed = trained(tmp_path / "run", options=on(3))
    assert resumed.code == 0, resumed.said
    assert "resumed step 4" in resumed.out
    is_as_whole(tmp_path / "run", whole)
    for run_dir, options in runs.values():
        ended = trained(run_dir, "what=more", options=options)
        assert ended.code == 0, ended.said
        assert "nothing to do: 6 of 6 updates are done" in ended.out
    assert files_of(tmp_path / "run", 8) == files_of(tmp_path / "tower", 8)
    is_as_whole(tmp_path / "run", tmp_path / "tower")


# Calls of a rank for files of the second save.
KILLS = ("pwrite,1,1", "fsync,0,5")


@pytest.mark.slow
@pytest.mark.parametrize("at", KILLS)
def test_a_rank_is_killed_in_the_midst_of_a_save(at: str, whole: Path, tmp_path: Path) -> None:
    run_dir, rank = tmp_path / "run", at.split(",")[1]
    killed = trained(run_dir, "what=KILL", f"at={at}", options=on(3))
    assert (tmp_path / "notes" / "happened").exists(), killed.said
    if rank != "0":
        assert killed.code == 1, killed.said
        # "by signal 9", or "by the kernel" if a test beside this test ran out of memory meanwhile:
        # the kernel's count of such ends is for the whole machine.
        assert f"quorate: rank {rank} was killed by" in killed.err
    assert inspected(run_dir)["global_step"] == 2
    resumed = trained(run_dir, options=on(2))
    assert resumed.code == 0, resumed.said
    assert "resumed step 2" in resumed.out
    is_as_whole(run_dir, whole, (2, 6))


@pytest.mark.slow
def test_a_rank_that_cannot_write_is_named_and_training_goes_on(
    whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ended = trained(run_dir, "what=full", "at=pwrite,1,1", options=on(3))
    assert ended.code == 0, ended.said
    assert re.search(
        rf"step 4 was not saved, training continues: .*rank 1 on {HOST}: "
        r"No space left on device, in a checkpoint of [0-9,]+ bytes: '.*/checkpoints/",
        ended.out,
    ), ended.out
    assert "step 6 was saved: checkpoints can be written again" in ended.out
    assert saved_steps(run_dir) == [2, 6]
    is_as_whole(run_dir, whole, (2, 6))
