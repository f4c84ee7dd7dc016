"""Weights to begin from: files of torch, checkpoints, runs; hostile ones are a line, not a wait."""

import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from support.digests import digest, digest_of
from support.messages import expect_error
from support.small import DATA, Small, trainer

import quorate
from quorate.errors import CheckpointError


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 2 and 4."""
    run_dir = tmp_path_factory.mktemp("sound")
    trainer(run_dir, save_every_steps=2, summary_every_s=None).fit(DATA, steps=4)
    return run_dir


def weights_of(model: torch.nn.Module) -> str:
    return digest(model.state_dict().items())


def test_weights_of_plain_torch_are_a_beginning(tmp_path: Path) -> None:
    torch.manual_seed(9)
    source = Small()
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
        named = {prefix + name: value for name, value in source.state_dict().items()}
        save_file(named, tmp_path / f"{prefix}weights.safetensors")
        torch.save(named, tmp_path / f"{prefix}weights.pt")
        torch.save({"epoch": 3, "state_dict": named}, tmp_path / f"{prefix}nested.pt")
    for path in tmp_path.iterdir():
        assert weights_of(trainer(None, init_from=path).model) == weights_of(source), path


def test_weights_of_a_run_are_a_beginning(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first")
    first.fit(DATA, steps=3)
    second = trainer(tmp_path / "second", init_from=tmp_path / "first")
    assert weights_of(second.model) == weights_of(first.model)
    second.fit(DATA, steps=2)
    resumed = trainer(tmp_path / "second", init_from=tmp_path / "first")
    resumed.fit(DATA, steps=4)
    whole = trainer(tmp_path / "whole", init_from=tmp_path / "first", workers=1)
    whole.fit(DATA, steps=4)
    assert digest_of(resumed) == digest_of(whole)


def test_weights_that_do_not_fit_are_named_with_both_shapes(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"first.weight": torch.zeros(2, 2), "extra": torch.zeros(1)}, path)
    with expect_error(CheckpointError, name=f"weights of {path}"):
        trainer(None, init_from=path)
    torch.save(Small(), path)  # a pickle of a class: no code of the pickle is run
    with expect_error(CheckpointError, hide=r"(?<=got ).*(?=, expected a)"):
        trainer(None, init_from=path)
    with expect_error(CheckpointError):
        trainer(None, init_from=tmp_path / "nothing.pt")
    path.write_bytes(b"no weights")
    with expect_error(CheckpointError):
        trainer(None, init_from=path)


def test_a_flipped_bit_in_a_checkpoint_is_no_beginning(sound: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sound / "checkpoints" / "step-000000000004", copy)
    trainer(None, init_from=copy)
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with expect_error(CheckpointError):
        trainer(None, init_from=copy)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_whatever_a_reader_raises_is_one_line(kind: str, tmp_path: Path) -> None:
    """Flips, cuts, blanks and zeros at places chosen by a seed; none is a traceback."""
    torch.manual_seed(1)
    file, state = io.BytesIO(), Small().state_dict()
    torch.save(state, file, _use_new_zipfile_serialization=kind == "zip")
    content = save(state) if kind == "safetensors" else file.getvalue()
    path = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pt'}"
    chance, refused = random.Random(0), 0
    model = Small()
    for _ in range(120):
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
        before, wrong = weights_of(model), None
        try:
            quorate.load_weights(model, path, lambda _: None)
        except CheckpointError as error:
            wrong = str(error)
        if wrong is not None:
            refused += 1
            assert wrong.isprintable()  # a line end is not
            assert weights_of(model) == before
    assert refused > 40


def test_fifos_devices_and_dicts_of_other_things_are_no_weights(tmp_path: Path) -> None:
    for suffix in ("pt", "safetensors"):
        os.mkfifo(tmp_path / f"pipe.{suffix}")
        with expect_error(CheckpointError):
            quorate.load_weights(Small(), tmp_path / f"pipe.{suffix}")
    with expect_error(CheckpointError):
        quorate.load_weights(Small(), "/dev/zero")
    for odd in ({"weight": 1.0}, {1: torch.ones(1)}):
        torch.save(odd, tmp_path / "odd.pt")
        with expect_error(CheckpointError):
            quorate.load_weights(Small(), tmp_path / "odd.pt")


# --- files that would fill memory -----------------------------------------------------------------


class Bomb:
    """A pickle of few bytes whose loading would take as many as there are."""

    def __reduce__(self) -> tuple[Callable[[int], bytearray], tuple[int]]:
        return bytearray, (8 << 30,)


def zip_bomb(path: Path) -> None:
    torch.save(Small().state_dict(), path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data + bytes(1 << 24 if "/data/" in name else 0))


def pickle_bomb(path: Path) -> None:
    torch.save({"first.weight": Bomb()}, path, pickle_protocol=2)


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
    sparse_pickle: ("pt", "bytes of memory can be had"),
    sparse_tensors: ("safetensors", "first.weight: the file has (274877906944,), the model"),
}


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.__name__)
def test_files_that_would_fill_memory_are_refused(
    bomb: Callable[[Path], None], tmp_path: Path
) -> None:
    suffix, words = BOMBS[bomb]
    bomb(tmp_path / f"weights.{suffix}")
    with pytest.raises(CheckpointError) as caught:
        quorate.load_weights(Small(), tmp_path / f"weights.{suffix}")
    assert words in str(caught.value)
