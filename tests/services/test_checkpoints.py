"""Checkpoints: each is whole or passed over, whatever the damage, and training goes on."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from support import fits
from support.digests import digest, digest_of
from support.disks import disk
from support.forgery.forge import IMPOSSIBLE, forge
from support.forgery.forged import Forged
from support.messages import expect_error
from support.runs import inspected
from support.small import DATA, Small, loss, trainer

import quorate
from quorate.__main__ import main
from quorate.errors import CheckpointError

TESTS = Path(__file__).parents[1]
FORGERIES = int(os.environ.get("QUORATE_TEST_FORGERIES", "30"))
TENSOR_FILES = ("model.safetensors", "averaged.safetensors", "optimizer.safetensors")
FILES = (*TENSOR_FILES, "state.json", "complete")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with three checkpoints, and nothing else inside."""
    run_dir = tmp_path_factory.mktemp("sound")
    trainer(run_dir, save_every_steps=2, summary_every_s=None).fit(DATA, steps=6)
    for path in run_dir.glob("*.json*"):
        path.unlink()
    return run_dir


@pytest.fixture
def run_dir(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:012d}"


def listed(run_dir: Path) -> dict[int, bool]:
    """Return the soundness of all checkpoints, newest first."""
    return {one["global_step"]: one["is_sound"] for one in inspected(run_dir)["checkpoints"]}


def trained(run_dir: Path | None, steps: int = 8, **options: Any) -> quorate.Trainer:
    made = trainer(run_dir, summary_every_s=None, **options)
    made.fit(DATA, steps=steps)
    return made


@pytest.fixture(scope="module")
def whole() -> str:
    """Return the digest of step 8 of a run without saves."""
    made = trainer(None)
    made.fit(DATA, steps=8)
    return digest_of(made)


# --- damage ---------------------------------------------------------------------------------------


def damage(how: str, file: Path, other: Path) -> None:
    data = bytearray(file.read_bytes())
    match how:
        case "flip":
            data[len(data) // 2] ^= 1 << 4
        case "cut":
            del data[-1:]
        case "remove":
            file.unlink()
            return
        case "swap":
            data, mine = bytearray(other.read_bytes()), data
            other.write_bytes(mine)
        case "extend":
            data += b"\0"
        case "blank":  # as a power cut leaves a file whose blocks never came to the disk
            data = bytearray(len(data))
        case name:  # a person changes a figure, in proper JSON
            record = json.loads(data)
            record[name] += 1
            data = bytearray(json.dumps(record, indent=1).encode() + b"\n")
    file.write_bytes(data)


DAMAGES = [
    *product(FILES, ("flip", "cut", "remove", "swap", "extend", "blank")),
    *product(["state.json"], ("global_step", "seed", "shards", "epoch", "batch_size", "format")),
]


def test_damaged_checkpoints_are_passed_over(
    sound: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, how in DAMAGES:
        damage(how, path_of(run_dir, 6) / name, path_of(run_dir, 4) / name)
        is_sound = {6: False, 4: how != "swap", 2: True}
        assert [*listed(run_dir).items()] == [*is_sound.items()], (name, how)  # newest first
        if how == "swap":
            copy = shutil.copytree(run_dir, run_dir.with_name(name))
            capsys.readouterr()
            assert trained(copy, 3).global_step == 3
            assert capsys.readouterr().out.count("skipped a checkpoint: ") == 2
        shutil.copytree(sound, run_dir, dirs_exist_ok=True)


def change(run_dir: Path, way: str) -> str:
    """Change the newest checkpoint; return the reason to pass the checkpoint over."""
    newest = path_of(run_dir, 6)
    match way:
        case "under another step":
            newest.rename(path_of(run_dir, 9))
            return "holds step 6, and its name says 9"
        case "under another form of the name":
            newest.rename(newest.with_name("step-6"))
            return "got 'step-6', expected the name 'step-000000000006'"
        case "a FIFO":
            shutil.rmtree(newest)
            os.mkfifo(newest)
            return "step-000000000006: not a directory"
        case "a link to nowhere":
            shutil.rmtree(newest)
            newest.symlink_to(run_dir / "not mounted")
            return "a link that leads nowhere"
        case "a kill after the rename":
            (newest / "complete").unlink()
            return f"{newest}: no file 'complete': it was cut off while it was saved"
        case "a file of another step":  # with checksums made anew, but the record's in it
            forged = Forged(newest, random.Random(0))
            name = "optimizer.safetensors"
            forged.raw[name] = (path_of(run_dir, 4) / name).read_bytes()
            forged.write()
            return "was saved with a record of SHA-256"
        case name:
            (newest / name).unlink()
            os.mkfifo(newest / name)
            return f"{newest / name}: a FIFO, not a regular file"


@pytest.mark.parametrize(
    "way",
    [
        *("under another step", "under another form of the name", "a FIFO", "a link to nowhere"),
        *("a kill after the rename", "a file of another step", "state.json"),
    ],
)
def test_a_run_goes_on_from_the_newest_sound_one_and_says_why(
    way: str, run_dir: Path, whole: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = change(run_dir, way)
    assert main(["inspect", str(run_dir)]) == 0
    assert reason.removeprefix(str(run_dir)) in capsys.readouterr().out
    assert inspected(run_dir)["global_step"] == 4
    assert digest_of(trained(run_dir, keep=1)) == whole
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if "skipped a checkpoint" in line]
    assert reason in line
    assert "resumed step 4 (epoch 1, 80%) from" in out
    # Foreign files are left alone.
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert path_of(run_dir, 8).name in names
    assert not {path_of(run_dir, step).name for step in (2, 4)} & names
    if way == "under another form of the name":
        assert "step-6" in names


def test_a_resume_that_is_refused_leaves_no_half_of_a_state(run_dir: Path) -> None:
    """The next call does not begin anew, as if there were no checkpoint."""
    other = trainer(run_dir, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    before = digest(other.model.state_dict().items())
    for _ in range(2):
        with expect_error(CheckpointError):
            other.fit(DATA, steps=8)
        assert other.global_step == 0
        assert digest(other.model.state_dict().items()) == before


# --- sound checksums, nonsense inside -------------------------------------------------------------


def is_shown_safely(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_forged_checkpoints_are_passed_over(
    sound: Path, whole: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(FORGERIES):
        run_dir = tmp_path / f"{number}"
        shutil.copytree(sound, run_dir)
        what = f"forgery {number}: {forge(path_of(run_dir, 6), number)!r}"
        shutil.rmtree(path_of(run_dir, 2))
        assert main(["inspect", str(run_dir)]) == 0, what
        shown = capsys.readouterr()
        assert is_shown_safely(shown.out + shown.err), what
        assert "forged" not in shown.out.replace(str(run_dir), ""), what
        assert digest_of(trained(run_dir)) == whole, what
        out = capsys.readouterr().out
        [line] = [line for line in out.splitlines() if "skipped a checkpoint" in line]
        assert f"skipped a checkpoint: {run_dir}" in line, what
        assert is_shown_safely(out), what
        shutil.rmtree(run_dir)


def test_each_value_that_cannot_be_is_found(sound: Path, run_dir: Path) -> None:
    newest = path_of(run_dir, 6)
    Forged(newest, random.Random(0)).write()
    assert listed(run_dir)[6]  # the forgeries below are the only damage
    for trail, values in IMPOSSIBLE.items():
        for value in values:
            shutil.copytree(path_of(sound, 6), newest, dirs_exist_ok=True)
            forged = Forged(newest, random.Random(0))
            forged.inside(trail)[trail[-1]] = value
            forged.write()
            assert not listed(run_dir)[6], (trail, value)


# --- the files ------------------------------------------------------------------------------------

DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"),
)


class OfAllDtypes(Small):
    """Has buffers of each dtype that a file can hold, under names that need quotes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("precise", torch.ones(3).double())
        for dtype in DTYPES:
            for name, shape in (('zé"\n', (2, 3)), ("a", ())):
                values = torch.arange(6, dtype=torch.uint8).reshape(2, 3) if shape else 1
                value = torch.as_tensor(values).to(getattr(torch, dtype))
                self.register_buffer(name + dtype, value)


def parts_of(content: bytes) -> tuple[Any, bytes]:
    """Return the header of a safetensors file, whose metadata are in any order, and the rest."""
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def test_files_are_as_safetensors_itself_writes_them(tmp_path: Path) -> None:
    made = fits.fit(OfAllDtypes, loss, DATA, run_dir=tmp_path, steps=1)
    file = path_of(tmp_path, 1) / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        again = safetensors_bytes(tensors, opened.metadata())
    assert parts_of(again) == parts_of(file.read_bytes())
    expected = made.model.state_dict()
    assert digest(sorted(tensors.items())) == digest(sorted(expected.items()))
    assert inspected(tmp_path)["digest"] == digest(expected.items())  # computed without torch


MOST = 30_000_000  # bytes


@pytest.mark.parametrize("piece", [b"{", b'{"a":{}},', b'"\\"'])
def test_no_header_and_no_record_is_read_for_long(piece: bytes, run_dir: Path) -> None:
    text = piece * (MOST // len(piece))
    file = run_dir / "weights.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    begun = time.monotonic()
    with expect_error(CheckpointError):
        quorate.load_weights(Small(), file)
    Forged(path_of(run_dir, 6), random.Random(0)).seal(b'{"optimizer_state": [' + text)
    assert inspected(run_dir)["global_step"] == 4
    assert time.monotonic() - begun < 30  # the time was over 70 s once


# --- a full disk, a directory without write permission --------------------------------------------


NBYTES = 4 * 3 * (6 * 4000 + 4000 + 4000 + 1) + 16  # parameters, two moments, four counters


def test_older_checkpoints_are_sound_when_the_disk_fills_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk(tmp_path / "disk", "1500k") as place:
        options = {"optimizer": torch.optim.Adam, "save_every_steps": 3, "run_dir": place / "run"}
        wide = torch.nn.Sequential(torch.nn.Linear(6, 4000), torch.nn.Linear(4000, 1))
        with pytest.raises(OSError, match=r"step 20 is not saved: .* No space left"):
            fits.fit(wide, loss, DATA, **options, summary_every_s=None, epochs=4)
        out = capsys.readouterr().out
        assert out.count("was not saved, training continues: [Errno 28]") == 1
        assert f"in a checkpoint of {NBYTES:,} bytes: '{place / 'run' / 'checkpoints'}" in out
        # The newest checkpoints fill the disk: none was given up for a checkpoint without room.
        assert listed(place / "run") == {9: True, 6: True, 3: True}
        assert len([*(place / "run" / "checkpoints").iterdir()]) == 3


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_saves_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """QUORATE_TEST_KILLS=0: at each system call of all saves."""
    kills = os.environ.get("QUORATE_TEST_KILLS", "6")
    script = TESTS / "scripts" / "killed_in_saves.py"
    words = [sys.executable, str(script), str(tmp_path), kills]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
