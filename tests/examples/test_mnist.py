"""examples/mnist as a user runs it, on small files made with ``quorate convert``; the converter."""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from open_data.sources import File
from support.example_modules import EXAMPLES, example_modules
from support.warm import WARM
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quorate.commands.main import main
from quorate.data.tfrecord.images import read_images

EXAMPLE = EXAMPLES / "mnist"

with example_modules(EXAMPLE) as example:
    recipe = example.recipe


LINE = (
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: step (\d+), loss = \d\.\d\d "
    r"\(\d+\.\d examples/sec; \d+\.\d{3} sec/batch\)$"
)


def write_idx(folder: Path, name: str, rows: int) -> tuple[Path, Path]:
    """A pair of files, the first of them compressed: images that are bright where labels say."""
    draw = np.random.default_rng(rows)
    labels = draw.integers(0, 10, rows, dtype=np.uint8)
    images = draw.integers(0, 60, (rows, 28, 28), dtype=np.uint8)
    for row, label in enumerate(labels):
        images[row, 2 * label + 4 : 2 * label + 7] += 180
    pair = folder / f"{name}-images.gz", folder / f"{name}-labels"
    header = struct.pack(">HBBIII", 0, 8, 3, *images.shape)
    pair[0].write_bytes(gzip.compress(header + images.tobytes()))
    pair[1].write_bytes(struct.pack(">HBBI", 0, 8, 1, rows) + labels.tobytes())
    return pair


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mnist")
    for name, rows in (("train", 300), ("validation", 60)):
        pair = map(str, write_idx(folder, name, rows))
        assert main(["convert", *pair, str(folder / f"{name}.tfrecord")]) == 0
    return folder


def run(folder: Path, workers: int, data: Path, *arguments: str) -> tuple[int, str]:
    command = ["run", "--devices", "cpu", "--workers", str(workers), "--run-dir", str(folder)]
    code, out, err = WARM.run(
        [*command, str(EXAMPLE / "train.py"), "--", "--data", str(data), *arguments],
        os.environ,
        120,
    )
    assert err == ""
    return code, out


@pytest.mark.slow
def test_one_digest_on_one_and_two_workers(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And exit code 1 below the target."""
    digests = set()
    for workers, target, expected in ((1, "0.0", 0), (2, "1.01", 1)):
        folder = tmp_path / f"run{workers}"
        arguments = ("--num-epochs", "1", "--log-every", "2", "--target", target)
        code, out = run(folder, workers, data, *arguments)
        assert code == expected, out
        assert re.findall(LINE, out, re.MULTILINE) == ["2"]
        assert "Done training for 1 epochs, 3 steps." in out
        assert re.search(rf"^test accuracy 0\.\d{{4}}, target {target}$", out, re.MULTILINE)
        assert main(["inspect", str(folder), "--json"]) == 0
        digests.add(json.loads(capsys.readouterr().out)["digest"])
    assert len(digests) == 1

    # Each replica's loss, and their mean.
    events = EventAccumulator(str(folder / "summaries")).Reload()
    curves = {name: events.Scalars(name)[-1].value for name in ("loss", "loss_0", "loss_1")}
    assert min(curves["loss_0"], curves["loss_1"]) <= curves["loss"]
    assert max(curves["loss_0"], curves["loss_1"]) >= curves["loss"]


@pytest.mark.slow
def test_the_plain_loop(data: Path) -> None:
    """It logs as the tutorial did, and ends in the same way."""
    command = ["run", str(EXAMPLE / "single.py"), "--", "--data", str(data), "--num-epochs", "1"]
    arguments = [*command, "--log-every", "2", "--target", "1.01"]
    code, out, err = WARM.run([*arguments, "--threads", "1"], os.environ, 120)
    assert (code, err) == (1, ""), out
    assert re.findall(LINE, out, re.MULTILINE) == ["2"]
    assert "Done training for 1 epochs, 3 steps." in out


def test_recipe_numbers_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--lr 0.1 --lr-decay 0.5 --decay-steps 2 --momentum 0 --filters 4 6 --units 20 --l2 0.01"
    )
    words += " --batch-size 50 --ema-decay 0.9 --num-epochs 3 --threads 1"
    monkeypatch.setattr(sys, "argv", ["single.py", *words.split()])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        chosen = recipe.Recipe.of(recipe.parse("text", threads=True))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert chosen.updates(120) == 9
    assert chosen.done(120) == "Done training for 3 epochs, 9 steps."
    assert recipe.Recipe(steps=5, batch_size=50).done(120) == "Done training for 1 epochs, 5 steps."
    net = chosen.network()
    assert [tuple(p.shape) for p in net.parameters() if p.dim() > 1] == [
        (4, 1, 5, 5), (6, 4, 5, 5), (20, 294), (10, 20), (10, 10),
    ]  # fmt: skip
    optimizer = chosen.optimizer(net.parameters())
    schedule = chosen.schedule(120)(optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0
    for n in range(5):
        assert schedule.get_last_lr()[0] == pytest.approx(0.1 * 0.5 ** (n / 2))
        optimizer.step()
        schedule.step()
    batch = [torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([1, 2])]
    model = example.model
    plain, more = (model.loss_with(l2)(net, batch)["loss"].item() for l2 in (0.0, 0.01))
    squares = sum(
        float(p.detach().double().square().sum()) for p in net.parameters() if p.dim() > 1
    )
    assert more - plain == pytest.approx(0.005 * squares, rel=1e-4)
    averaged = chosen.averaged(net)
    assert averaged is not None
    assert recipe.Recipe().averaged(net) is None


def test_the_two_programs_differ_in_few_lines_and_the_readme_shows_them() -> None:
    single, train = (
        (EXAMPLE / name).read_text().splitlines() for name in ("single.py", "train.py")
    )
    diff = list(difflib.unified_diff(single, train, "single.py", "train.py", lineterm="", n=0))
    changed = [line for line in diff[2:] if line[:1] in "+-"]
    assert len(changed) <= 40
    readme = (EXAMPLE / "README.md").read_text()
    shown = re.search(r"```diff\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    assert [line for line in shown[1].splitlines()[2:] if line[:1] in "+-"] == changed


def test_published_files_are_fetched_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = example.data

    class Shelf:
        title = "the shelf"

        def get(self, files: Sequence[File], into: Path) -> None:
            for file in files:
                (into / file.name).write_bytes(contents[file.name])

    contents = {}
    for name, rows in ((data.TRAIN, 8), (data.VALIDATION, 5)):
        images, labels = (path.read_bytes() for path in write_idx(tmp_path, name, rows))
        contents |= zip(data.PAIRS[name], (gzip.decompress(images), labels), strict=True)
    files = [File(name, hashlib.sha256(c).hexdigest()) for name, c in contents.items()]
    monkeypatch.setattr(data, "FILES", tuple(files))
    monkeypatch.setattr(data, "SOURCES", (Shelf(),))
    monkeypatch.setenv("QUORATE_DATA", str(tmp_path / "cache"))
    said: list[str] = []
    train, validation = data.load(say=said.append)
    assert (len(train), len(validation)) == (8, 5)
    assert train[3][0].shape == (1, 28, 28)
    assert train[3][1] == contents["train-labels-idx1-ubyte"][8 + 3]
    assert len(said) == 3
    assert "from the shelf" in said[0]
    assert "8 records with image_raw and label" in said[1]
    data.load(say=pytest.fail)
    (tmp_path / "cache" / "mnist" / data.VALIDATION).unlink()
    data.load(say=said.append)
    assert [line.split(",")[0] for line in said[3:]] == [
        "MNIST: 5 records with image_raw and label"
    ]


# The converter.


def test_convert(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_idx(tmp_path, "a", 20)
    target = tmp_path / "a.tfrecord"
    assert main(["convert", *map(str, pair), str(target), "--rows", "5:15"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{target}: 10 records, 0.0 MB; image_raw: bytes of shape (28, 28); ")
    images = np.frombuffer(gzip.decompress(pair[0].read_bytes())[16:], np.uint8)
    labels = pair[1].read_bytes()[8:]
    found = read_images(target, (1, 28, 28))
    assert len(found) == 10
    for row in range(10):
        assert found[row][0].flatten().tolist() == images[784 * (row + 5) :][:784].tolist()
        assert found[row][1].item() == labels[row + 5]

    np.savez(tmp_path / "a.npz", x=images.reshape(20, 28, 28, 1), y=np.array([*labels])[:, None])
    for rows in ("19:20", ":"):
        command = ["convert", str(tmp_path / "a.npz"), str(target), "--overwrite", "--rows", rows]
        assert main(command) == 0
    assert "shape (28, 28, 1)" in capsys.readouterr().out
    again = read_images(target, (28, 28, 1))
    assert len(again) == 20
    assert again[5][0].flatten().tolist() == found_pixels(images, 5)
    assert [label.item() for _, label in again.__getitems__(range(20))] == list(labels)


def found_pixels(images: np.ndarray, row: int) -> list[int]:
    return images[784 * row : 784 * (row + 1)].tolist()


def test_what_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = write_idx(tmp_path, "a", 20)
    other = write_idx(tmp_path, "b", 19)[1]
    np.savez(tmp_path / "names.npz", a=np.zeros(3))
    np.savez(tmp_path / "floats.npz", images=np.zeros((3, 2, 2)), labels=np.zeros(3, np.int8))
    np.savez(tmp_path / "objects.npz", images=np.array([{}, None]), labels=np.zeros(2))
    (tmp_path / "torn.npz").write_bytes((tmp_path / "floats.npz").read_bytes()[:200])
    (tmp_path / "text.npz").write_text("text")
    target = str(tmp_path / "new")
    for arguments, told in (
        ([images, labels, images], "target: got .* expected a new file"),
        ([images, target], "sources: got"),
        ([images, labels, labels, target], "sources: got"),
        ([images, other, target], "got 19 labels, expected 20, as"),
        ([labels, images, target], "expected uint8 images"),
        ([images, images, target], "expected whole numbers"),
        ([images, labels, target, "--rows", "3"], "--rows: got '3', expected START:END within"),
        ([images, labels, target, "--rows", "3:21"], "--rows: got"),
        ([images, labels, target, "--rows", "3:3"], "--rows: got"),
        ([images, labels, tmp_path / "nowhere" / "new"], "No such file or directory"),
        ([tmp_path / "nothing.npz", target], "no such file"),
        ([tmp_path / "names.npz", target], "got the arrays a, expected two named images and lab"),
        ([tmp_path / "floats.npz", target], r"got float64 \(3, 2, 2\), expected uint8 images"),
        ([tmp_path / "objects.npz", target], "objects.npz: got"),
        ([tmp_path / "torn.npz", target], "torn.npz: got"),
        ([tmp_path / "text.npz", target], "text.npz: got"),
    ):
        assert main(["convert", *map(str, arguments)]) == 2, arguments
        message = capsys.readouterr().err
        assert re.search(told, message), message
        assert message.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))
