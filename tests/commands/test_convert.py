"""``quorate convert``: images and labels, as IDX files or arrays, become records."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from support.example_data import idx

from quorate.__main__ import main
from quorate.data.tfrecord.images import read_images


def pair(folder: Path, name: str, rows: int) -> tuple[Path, Path]:
    """Write a pair of files, the first of them compressed."""
    images, labels = folder / f"{name}-images.gz", folder / f"{name}-labels"
    idx(images, labels, rows)
    images.write_bytes(gzip.compress(images.read_bytes()))
    return images, labels


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources, target = pair(tmp_path, "a", 20), tmp_path / "a.tfrecord"
    pixels = np.frombuffer(gzip.decompress(sources[0].read_bytes())[16:], np.uint8)
    images, labels = pixels.reshape(20, 28, 28, 1), [*sources[1].read_bytes()[8:]]
    assert main(["convert", *map(str, sources), str(target), "--rows", "5:15"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{target}: 10 records, 0.0 MB; image_raw: bytes of shape (28, 28); ")
    found = read_images(target, (1, 28, 28))
    assert len(found) == 10
    for row, (image, label) in enumerate(found[n] for n in range(10)):
        assert image.flatten().tolist() == images[row + 5].flatten().tolist()
        assert label.item() == labels[row + 5]

    np.savez(tmp_path / "a.npz", x=images, y=np.array(labels)[:, None])
    assert main(["convert", str(tmp_path / "a.npz"), str(target), "--overwrite"]) == 0
    assert "shape (28, 28, 1)" in capsys.readouterr().out
    again = read_images(target, (28, 28, 1))
    assert len(again) == 20
    assert again[5][0].tolist() == images[5].tolist()
    assert [label.item() for _, label in again.__getitems__(range(20))] == labels


def test_what_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = pair(tmp_path, "a", 20)
    other = pair(tmp_path, "b", 19)[1]
    np.savez(tmp_path / "names.npz", a=np.zeros(3))
    np.savez(tmp_path / "floats.npz", images=np.zeros((3, 2, 2)), labels=np.zeros(3, np.int8))
    (tmp_path / "torn.npz").write_bytes((tmp_path / "floats.npz").read_bytes()[:200])
    target = str(tmp_path / "new")
    for arguments, told in (
        ([images, other, target], "got 19 labels, expected 20, as"),
        ([labels, images, target], "expected uint8 images"),
        ([images, labels, target, "--rows", "3"], "--rows: got '3', expected START:END within"),
        ([tmp_path / "names.npz", target], "got the arrays a, expected two named images and lab"),
        ([tmp_path / "floats.npz", target], r"got float64 \(3, 2, 2\), expected uint8 images"),
        ([tmp_path / "torn.npz", target], "torn.npz: got"),
    ):
        assert main(["convert", *map(str, arguments)]) == 2, arguments
        message = capsys.readouterr().err
        assert re.search(told, message), message
        assert message.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))
