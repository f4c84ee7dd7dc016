"""Hostile and damaged files in the place of a run's, and of weights: one line, never a wait."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.digests import digest_of
from support.messages import expect_error
from support.small import DATA, Small, trainer

import quorate
from quorate.commands.main import main
from quorate.data.idx import read_idx
from quorate.errors import CheckpointError, DataError
from quorate.machine.regular_file import open_regular, read_regular
from quorate.replica.digest import digest
from quorate.services.checkpoints import files, record, tensor_file

ONE_GIB = 1 << 30


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 2 and 4."""
    run_dir = tmp_path_factory.mktemp("sound")
    trainer(run_dir, save_every_steps=2, summary_every_s=None).fit(DATA, steps=4)
    return run_dir


def weights_of(model: torch.nn.Module) -> str:
    return digest(model.state_dict().items())


# --- regular files --------------------------------------------------------------------------------


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path, kind in ((pipe, "FIFO"), (tmp_path / "link", "FIFO"), (tmp_path, "directory")):
        with pytest.raises(OSError, match=f"a {kind}, not a regular file"):
            open_regular(path)
    with pytest.raises(OSError, match="a character device"):
        open_regular("/dev/zero")


def test_a_regular_file_is_read_up_to_a_bound_also_through_a_link(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(there)
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="more than the 4 bytes"):
        read_regular(tmp_path / "link", 4)


# --- a run directory ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "complete"])
def test_a_fifo_in_a_run_directory_holds_nobody_up(
    name: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sound, tmp_path / "run")
    file = files.checkpoint_of(tmp_path / "run", 4) / name
    file.unlink()
    os.mkfifo(file)
    again = trainer(tmp_path / "run")
    again.fit(DATA, steps=6)
    reason = f"{file}: a FIFO, not a regular file"
    assert f"skipped a checkpoint: {reason}" in capsys.readouterr().out
    whole = trainer(None)
    whole.fit(DATA, steps=6)
    assert digest_of(again) == digest_of(whole)
    assert main(["inspect", str(tmp_path / "run")]) == 0


def test_a_directory_under_another_form_of_the_name_is_passed_over(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be one more checkpoint of a step, or of none."""
    shutil.copytree(sound, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step-000000000002", folder / "step-9")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "got 'step-9', expected the name 'step-000000000009'" in capsys.readouterr().out
    trainer(tmp_path / "run", keep=1).fit(DATA, steps=6)
    assert "skipped a checkpoint" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000000006", "step-9"]


def test_a_file_under_the_name_of_a_checkpoint_is_said(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    os.mkfifo(files.checkpoint_of(tmp_path / "run", 6))
    found = files.find(tmp_path / "run")
    assert found is not None
    assert found.path == files.checkpoint_of(tmp_path / "run", 4)
    assert "step-000000000006: not a directory" in found.passed_over[0]
    listed = files.listing(tmp_path / "run")
    assert [one.wrong is None for one in listed] == [False, True, True]


def test_files_of_two_checkpoints_are_not_taken_for_one(sound: Path, tmp_path: Path) -> None:
    """With checksums made anew: sound files of the same run, of another step."""
    shutil.copytree(sound, tmp_path / "run")
    new, old = (files.checkpoint_of(tmp_path / "run", step) for step in (4, 2))
    record = json.loads((new / "state.json").read_text())
    shutil.copyfile(old / "optimizer.safetensors", new / "optimizer.safetensors")
    theirs = json.loads((old / "state.json").read_text())["files"]["optimizer.safetensors"]
    record["files"]["optimizer.safetensors"] = theirs
    text = json.dumps(record).encode()
    (new / "state.json").write_bytes(text)
    (new / "complete").write_bytes(files.marker(text))
    found = files.find(tmp_path / "run")
    assert found is not None
    assert found.path == old
    assert "was saved with a record of SHA-256" in found.passed_over[0]


def test_a_resume_that_is_refused_leaves_no_half_of_a_state(sound: Path, tmp_path: Path) -> None:
    """And the next call does not go on from the beginning as if there were no checkpoint."""
    shutil.copytree(sound, tmp_path / "run")
    other = trainer(tmp_path / "run", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    before = weights_of(other.model)
    for _ in range(2):
        with expect_error(CheckpointError):
            other.fit(DATA, steps=6)
        assert other.global_step == 0
        assert weights_of(other.model) == before


# --- weights to begin from ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_flipped_bit_in_a_checkpoint_is_no_beginning(
    name: str, sound: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(files.checkpoint_of(sound, 4), copy)
    trainer(None, init_from=copy)
    data = bytearray((copy / name).read_bytes())
    data[-20] ^= 1
    (copy / name).write_bytes(data)
    with expect_error(CheckpointError):
        trainer(None, init_from=copy)


def test_a_checkpoint_under_the_name_of_another_step_is_no_beginning(
    sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(files.checkpoint_of(sound, 4), tmp_path / "step-000000000009")
    with expect_error(CheckpointError):
        trainer(None, init_from=tmp_path / "step-000000000009")


def test_weights_of_a_run_say_which_checkpoints_were_passed_over(
    sound: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(sound, tmp_path / "run")
    file = files.checkpoint_of(tmp_path / "run", 4) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    said: list[str] = []
    model = quorate.load_weights(Small(), tmp_path / "run", said.append)
    assert said[0].startswith(f"skipped a checkpoint: {file}: got SHA-256")
    old = quorate.load_weights(Small(), files.checkpoint_of(sound, 2))
    assert weights_of(model) == weights_of(old)
    caplog.clear()
    trainer(None, init_from=tmp_path / "run")
    assert f"skipped a checkpoint: {file}" in caplog.text


def saved(kind: str) -> bytes:
    torch.manual_seed(1)
    file = io.BytesIO()
    state = Small().state_dict()
    if kind == "safetensors":
        from safetensors.torch import save

        return save(state)
    torch.save(state, file, _use_new_zipfile_serialization=kind == "zip")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_whatever_a_reader_raises_is_one_line(kind: str, tmp_path: Path) -> None:
    """Flips, cuts, blanks and zeros at places that a seed chooses; none is a traceback."""
    content, chance = saved(kind), random.Random(0)
    path = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pt'}"
    refused = 0
    for _ in range(300):
        data = bytearray(content)
        at = chance.randrange(min(len(data), 1500) if chance.random() < 0.7 else len(data))
        match chance.randrange(4):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at : at + 8] = bytes(8)
            case _:
                data[at : at + 4] = chance.randbytes(4)
        path.write_bytes(data)
        model = Small()
        before, wrong = weights_of(model), None
        try:
            quorate.load_weights(model, path, lambda _: None)
        except CheckpointError as error:
            wrong = str(error)
        if wrong is not None:
            refused += 1
            assert wrong.isprintable()  # a line end is not
            assert weights_of(model) == before
    assert refused > 100


class Bomb:
    """A pickle of few bytes whose loading would take as many as there are."""

    def __reduce__(self) -> tuple[Callable[[int], bytearray], tuple[int]]:
        return bytearray, (8 * ONE_GIB,)


def zip_bomb(path: Path) -> None:
    torch.save(Small().state_dict(), path)
    parts = {}
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data + bytes(1 << 24 if "/data/" in name else 0))


def pickle_bomb(path: Path) -> None:
    torch.save({"first.weight": Bomb()}, path, pickle_protocol=2)


def legacy_bomb(path: Path) -> None:
    path.write_bytes(b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {})))
    with path.open("ab") as file:
        pickle.dump({"first.weight": Bomb()}, file, 2)


def sparse_pickle(path: Path) -> None:
    torch.save(Small().state_dict(), path)
    os.truncate(path, 1 << 40)


def sparse_tensors(path: Path) -> None:
    text = json.dumps(
        {"first.weight": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
    ).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + (1 << 40))


BOMBS = {
    zip_bomb: ("pt", "got compressed parts"),
    pickle_bomb: ("pt", "got a bytearray"),
    legacy_bomb: ("pt", "got a bytearray"),
    sparse_pickle: ("pt", "bytes of memory can be had"),
    sparse_tensors: ("safetensors", "first.weight: the file has (274877906944,), the model"),
}


def with_memory(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code that may take one GiB beside what the imports take."""
    begin = (
        "import resource, sys, torch, quorate; sys.path.insert(0, sys.argv[1]);"
        "from support.small import Small; import psutil;"
        "had = psutil.Process().memory_info().vms + (1 << 30);"
        "resource.setrlimit(resource.RLIMIT_AS, (had, had));"
    )
    words = [sys.executable, "-c", begin + code, str(Path(__file__).parents[1]), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_would_fill_memory_is_refused(
    bomb: Callable[[Path], None], tmp_path: Path
) -> None:
    suffix, reason = BOMBS[bomb]
    path = tmp_path / f"weights.{suffix}"
    bomb(path)
    done = with_memory(
        "\ntry: quorate.load_weights(Small(), sys.argv[2])\n"
        "except quorate.errors.CheckpointError as error: print(error)\n",
        str(path),
    )
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_a_fifo_and_a_device_are_no_weights(tmp_path: Path) -> None:
    for suffix in ("pt", "safetensors"):
        os.mkfifo(tmp_path / f"pipe.{suffix}")
        with expect_error(CheckpointError):
            quorate.load_weights(Small(), tmp_path / f"pipe.{suffix}")
    with expect_error(CheckpointError):
        quorate.load_weights(Small(), "/dev/zero")


def test_a_mistake_in_weights_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights.pt").write_bytes(saved("zip")[:900])
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, quorate\n"
        "quorate.Trainer(torch.nn.Linear(1, 1), lambda m, b: m(b).sum(), optimizer=torch.optim.SGD,"
        " batch_size=1)\n"
    )
    weights = str(tmp_path / "weights.pt")
    assert main(["run", "--devices", "cpu", "--init-from", weights, str(script)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"quorate: weights of {weights}: got ")
    assert len(err.splitlines()) == 1


def test_another_dtype_is_said_and_one_that_loses_all_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(2)
    state = Small().state_dict()
    half = {n: v.half() if v.is_floating_point() else v for n, v in state.items()}
    save_file(half, tmp_path / "half.safetensors")
    said: list[str] = []
    quorate.load_weights(Small(), tmp_path / "half.safetensors", said.append)
    assert "tensors (first: first.weight) from torch.float16 to torch.float32" in said[0]
    state["norm.num_batches_tracked"] = torch.tensor(1.5)
    torch.save(state, tmp_path / "odd.pt")
    with expect_error(
        CheckpointError, name="weights: norm.num_batches_tracked", got="torch.float32"
    ):
        quorate.load_weights(Small(), tmp_path / "odd.pt")


# --- data -----------------------------------------------------------------------------------------


def test_a_gzip_of_zeros_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    size = 1 << 31
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"\0\0\x08\x03" + struct.pack(">III", size, size, 1))
        file.write(bytes(1 << 20))
    with expect_error(DataError, offset=4, hide=r"[\d,]+(?= bytes of memory)"):
        read_idx(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * ONE_GIB // 1024


# --- headers and records that would take long, or much memory -------------------------------------

MOST = 60_000_000  # bytes


@pytest.mark.parametrize(
    "piece",
    [
        b"{",
        *(
            pytest.param(piece, marks=pytest.mark.slow)
            for piece in (
                b'{"a":',
                b"[],",
                b'{"a":{}},',
                b'"",',
                b"1,",
                b" ",
                b"\0",
                b"\\",
                b'"\\"',
            )
        ),
    ],
)
def test_no_header_and_no_record_is_read_for_long(piece: bytes, tmp_path: Path) -> None:
    text = piece * (MOST // len(piece))
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    begun = time.monotonic()
    with expect_error(CheckpointError):
        tensor_file.header(file)
    with pytest.raises(ValueError, match="got "):
        record.parsed(b'{"optimizer_state": [' + text)
    assert time.monotonic() - begun < 30  # it was over 70 s, for the first of the two
