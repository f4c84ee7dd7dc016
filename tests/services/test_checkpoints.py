"""Checkpoints: whatever happens to one, it is whole or it is passed over, and training goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest_of
from support.small import DATA, trainer
from support.system_calls import forked

from quorate.commands.main import main
from quorate.errors import CheckpointError
from quorate.services.checkpoints import files
from quorate.services.checkpoints.draft import Contents
from quorate.services.checkpoints.saver import Checkpoints, Policy

STEPS = (2, 4, 6)
FILES = (
    "model.safetensors",
    "averaged.safetensors",
    "optimizer.safetensors",
    "state.json",
    "complete",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with three checkpoints."""
    run_dir = tmp_path_factory.mktemp("sound")
    trainer(run_dir, save_every_steps=2, summary_every_s=None).fit(DATA, steps=STEPS[-1])
    return run_dir


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:012d}"


# --- damage ---------------------------------------------------------------------------------------


def flip(file: Path, _other: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def cut(file: Path, _other: Path, chance: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(len(data))])


def remove(file: Path, _other: Path, chance: random.Random) -> None:
    file.unlink()


def swap(file: Path, other: Path, chance: random.Random) -> None:
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def extend(file: Path, _other: Path, chance: random.Random) -> None:
    with file.open("ab") as end:
        end.write(chance.choice([b"\0", b"x" * chance.randrange(1, 99), file.read_bytes()]))


def blank(file: Path, _other: Path, chance: random.Random) -> None:
    """As a power cut leaves a file whose blocks never came to the disk."""
    file.write_bytes(bytes(file.stat().st_size))


def edit(file: Path, _other: Path, chance: random.Random) -> None:
    """A person who changes a figure, and leaves it proper JSON."""
    file = file.parent / "state.json"
    record = json.loads(file.read_text())
    name = chance.choice(["global_step", "seed", "shards", "epoch", "batch_size", "format"])
    record[name] += chance.choice([-1, 1, 7])
    file.write_text(json.dumps(record, indent=1) + "\n")


DAMAGES: list[Callable[[Path, Path, random.Random], None]] = [
    flip, cut, remove, swap, extend, blank, edit
]  # fmt: skip


@pytest.mark.slow
def test_a_thousand_damaged_checkpoints_are_each_passed_over(sound: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    counts: Counter[str] = Counter()
    for number in range(1000):
        run_dir = tmp_path / f"{number}"
        shutil.copytree(sound / "checkpoints", run_dir / "checkpoints")
        hit = [STEPS[-1]] if chance.random() < 0.7 else list(STEPS[1:])
        for step in hit:
            other = chance.choice([s for s in STEPS if s not in hit])
            name = chance.choice(FILES)
            damage = chance.choice(DAMAGES)
            damage(path_of(run_dir, step) / name, path_of(run_dir, other) / name, chance)
            counts[damage.__name__] += 1
        is_sound = {}
        for step in STEPS:  # byte by byte, by what it was before
            here, there = path_of(run_dir, step), path_of(sound, step)
            is_sound[step] = all(
                (here / name).exists() and (here / name).read_bytes() == (there / name).read_bytes()
                for name in FILES
            )
        left = max((step for step, fine in is_sound.items() if fine), default=0)
        assert not is_sound[STEPS[-1]]
        if not left:
            with pytest.raises(CheckpointError, match="sound"):
                files.find(run_dir)
        else:
            found = files.find(run_dir)
            assert found is not None
            assert found.path == path_of(run_dir, left)
            assert len(found.passed_over) == sum(step > left for step in STEPS)
            assert all(str(run_dir) in wrong for wrong in found.passed_over)
        wrong = {one.global_step for one in files.listing(run_dir) if one.wrong is not None}
        assert wrong == {step for step, fine in is_sound.items() if not fine}
        shutil.rmtree(run_dir)
    assert all(counts[damage.__name__] > 100 for damage in DAMAGES)


def test_a_checkpoint_under_another_name_is_none(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    path_of(tmp_path / "run", 6).rename(path_of(tmp_path / "run", 9))
    found = files.find(tmp_path / "run")
    assert found is not None
    assert found.record["global_step"] == 4
    assert "holds step 6, and its name says 9" in found.passed_over[0]


def test_a_run_goes_on_from_the_newest_sound_one_and_says_why(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trainer(None)
    whole.fit(DATA, steps=8)
    run_dir = tmp_path / "run"
    shutil.copytree(sound, run_dir)
    (path_of(run_dir, 6) / "complete").unlink()  # a kill after the rename
    (path_of(run_dir, 4) / "optimizer.safetensors").write_bytes(b"")
    capsys.readouterr()
    again = trainer(run_dir)
    again.fit(DATA, steps=8)
    out = capsys.readouterr().out
    assert f"{path_of(run_dir, 6)}: no file 'complete': it was cut off while it was saved" in out
    assert f"{path_of(run_dir, 4)}/optimizer.safetensors: got 0 bytes, expected" in out
    assert "resumed step 2 (epoch 1, 40%) from" in out
    assert digest_of(again) == digest_of(whole)


def test_inspect_says_which_are_sound(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sound, tmp_path / "run")
    edit(path_of(tmp_path / "run", 6) / "state.json", Path(), random.Random(0))
    capsys.readouterr()
    assert main(["inspect", "--json", str(tmp_path / "run")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["global_step"] == 4
    assert [(c["global_step"], c["is_sound"]) for c in facts["checkpoints"]] == [
        (6, False),
        (4, True),
        (2, True),
    ]
    assert main(["inspect", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "state.json: got SHA-256" in out
    assert sum("sound" in line.split() for line in out.splitlines()) == 2
    assert main(["inspect", str(tmp_path / "nothing")]) == 2


# --- a disk that is full, a directory that cannot be written to -----------------------------------

FIT = """
import sys, torch, quorate
sys.path.insert(0, sys.argv[3])
from support.small import DATA, loss
if int(sys.argv[2]):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 4000), torch.nn.Linear(4000, 1)
    def forward(self, x):
        return self.last(self.first(x))
trainer = quorate.Trainer(Wide, loss, optimizer=torch.optim.Adam, batch_size=12, shards=4,
    workers=quorate.Workers(engine="towers"), devices="cpu",
    run_dir=quorate.RunDir(sys.argv[1], save_every_steps=3, summary_every_s=None))
for epochs in range(1, 5):
    try:
        trainer.fit(DATA, epochs=epochs)
    except OSError as error:
        print("fit raised", error)
    print("at step", trainer.global_step)
"""

TESTS = str(Path(__file__).parents[1])


def fit_elsewhere(run_dir: Path, limit_bytes: int = 0, **options: Any) -> str:
    words = [
        sys.executable,
        "-c",
        FIT,
        str(run_dir),
        str(limit_bytes),
        TESTS,
    ]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_training_goes_on_over_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of a file: the kernel refuses to write on, as on a full disk."""
    limit = 200_000
    out = fit_elsewhere(tmp_path / "run", limit)
    nbytes = 4 * 3 * (6 * 4000 + 4000 + 4000 + 1)  # parameters, two moments
    folder = tmp_path / "run" / "checkpoints"
    assert "step 3 was not saved, training continues: [Errno 27] File too large" in out
    assert f"in a checkpoint of {nbytes + 16:,} bytes: '{folder}" in out  # and four counters
    # Nothing is lost without a word.
    assert "fit raised step 20 is not saved: [Errno 27] File too large" in out
    assert "make room there, and run the same command again" in out
    assert "at step 20" in out
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_older_checkpoints_are_sound_when_the_disk_fills_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of its own needs the right to mount")
    try:
        out = fit_elsewhere(disk / "run")
        assert "No space left on device" in out
        assert "fit raised" in out
        assert "at step 20" in out
        found = files.find(disk / "run")
        assert found is not None
        assert found.passed_over == []
        # The newest ones fill the disk: none was given up for one that did not fit.
        assert len(files.listing(disk / "run")) == 3
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_training_goes_on_when_the_directory_becomes_read_only(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a file system of its own needs the right to mount")
    try:
        run = trainer(disk / "run", save_every_steps=3)
        said = []
        run._say = said.append
        for report in run.updates(DATA, steps=12):
            if report.global_step == 2:
                run.save()
                subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            if report.global_step == 5:
                with pytest.raises(OSError, match=f"Read-only file system.*{disk}") as caught:
                    run.save()
                assert "bytes" in str(caught.value)
        assert run.global_step == 12
        found = files.find(disk / "run")
        assert found is not None
        assert found.record["global_step"] == 2
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_last_save_on_a_full_disk_ends_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        FIT.replace("except OSError", "except ZeroDivisionError").replace("range(1, 5)", "(1,)")
    )
    words = [sys.executable, str(script), str(tmp_path / "run"), "200000", TESTS]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("quorate: step 5 is not saved: [Errno 27]")
    assert line.endswith(
        "; make room there, and run the same command again: it resumes from the beginning"
    )
    assert ended.returncode == 1


def test_a_run_is_saved_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name in ("quorate-checkpoints", "quorate-worker table", "quorate-summaries"):
            raise RuntimeError("can't start new thread")
        starts(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    trainer(tmp_path / "run", 1, save_every_steps=2).fit(DATA, steps=5)
    assert [one.global_step for one in files.listing(tmp_path / "run")] == [5, 4, 2]
    out = capsys.readouterr().out
    assert "summaries failed, training continues: RuntimeError: can't start new thread" in out
    assert list((tmp_path / "run" / "summaries").iterdir())


# --- kills ----------------------------------------------------------------------------------------


def again(run_dir: Path, step: int) -> Contents:
    """Return the contents of a checkpoint of a run, as those of a step."""
    found = files.find(run_dir)
    assert found is not None
    record = {name: value for name, value in found.record.items() if name != "format"}
    account = {**record["account"], "best": None, "evaluated_at": 0}
    tensors = {name: files.tensors(found.path, name) for name in record.pop("files")}
    position = {"global_step": step, "epoch": step // 5, "account": account}
    return Contents(tensors, record | position)


@pytest.mark.slow
def test_a_kill_in_a_save_leaves_a_sound_checkpoint_of_no_older_step(tmp_path: Path) -> None:
    """A step is saved again, and the next one: a kill at each system call of these two saves."""
    trainer(tmp_path / "run", save_every_steps=2, summary_every_s=None).fit(DATA, steps=2)
    twice = [again(tmp_path / "run", step) for step in (2, 3)]

    def save(run_dir: Path) -> None:
        with closing(Checkpoints(run_dir, Policy(None, keep=1))) as saver:
            for contents in twice:
                saver.write(contents)

    def in_a_fork(last: int) -> tuple[Path, int]:
        run_dir = tmp_path / f"killed-{last}"
        shutil.copytree(tmp_path / "run" / "checkpoints", run_dir / "checkpoints")
        code, calls = forked(lambda: save(run_dir), "MainThread", last)
        assert code == (-9 if last else 0)
        return run_dir, calls

    _, calls = in_a_fork(0)
    newest = 2
    for last in range(1, calls + 1):
        run_dir, _ = in_a_fork(last)
        found = files.find(run_dir)
        assert found is not None, last
        assert found.record["global_step"] >= newest, last
        assert found.passed_over == [], last
        newest = found.record["global_step"]
        files.clear_up(run_dir)
        names = {path.name for path in (run_dir / "checkpoints").iterdir()}
        assert names <= {path_of(run_dir, step).name for step in (2, 3)}, last
        assert path_of(run_dir, newest).name in names, last
    assert newest == 3


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_saves_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """QUORATE_TEST_KILLS=0: at each system call of all saves."""
    kills = os.environ.get("QUORATE_TEST_KILLS", "8")
    script = Path(__file__).parents[1] / "scripts" / "killed_in_saves.py"
    words = [sys.executable, str(script), str(tmp_path), kills]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parents[1]), *sys.path])}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    newest = 0
    for kill in json.loads(done.stdout)["kills"]:
        assert kill["code"] == -9, kill
        assert kill["sound"] >= newest, kill
        assert kill["wrong"] == [], kill
        assert kill["is_same"], kill
        assert set(kill["left"]) <= {"step-000000000003", "step-000000000004"}, kill
        newest = kill["sound"]


# --- files of tensors -----------------------------------------------------------------------------


def test_a_file_is_laid_out_as_safetensors_itself_would() -> None:
    from safetensors.torch import save

    from quorate.services.checkpoints import tensor_file

    named = {"empty": torch.zeros(0, 3), "one": torch.tensor(2.0), "double": torch.ones(3).double()}
    for number, dtype in enumerate(tensor_file.TORCH_NAMES.values()):
        for name in ('zé"\n', "a", f"m.{number}"):
            named[name + dtype] = torch.zeros(2, 3, dtype=getattr(torch, dtype))
    shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in named.items()}
    begin, stored = tensor_file.laid_out(shapes, {"format": "pt"})
    expected = save(named, {"format": "pt"})
    assert expected[: len(begin)] == begin
    assert max(place.stop for place in stored.values()) == len(expected)
    at = stored["double"].start
    assert expected[at : at + 24] == named["double"].numpy().tobytes()
    with pytest.raises(ValueError, match="got dtype complex128, which no"):
        tensor_file.laid_out({"x": ("complex128", (1,))}, {})
