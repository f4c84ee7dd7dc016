"""examples/cifar10 as a user runs it, on small files of the same format."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_data.sources import File
from PIL import Image
from support.example_modules import EXAMPLES, example_modules
from support.warm import WARM
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.data import cache_dir
from quorate.errors import DataError

EXAMPLE = EXAMPLES / "cifar10"


with example_modules(EXAMPLE) as example:
    DATA, MODEL, RECIPE = example.data, example.model, example.recipe


PLAIN = RECIPE.Recipe()
STAMP = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: "


def stripes(rows: int, seed: int) -> np.ndarray:
    """Records of images with stripes whose width is their label: easy to tell apart."""
    generator = np.random.default_rng(seed)
    labels = np.arange(rows, dtype=np.uint8) % 10
    lines = (np.arange(32) // (labels[:, None] + 1)) % 2  # (N, 32)
    images = lines[:, None, :, None] * 120 + generator.integers(0, 100, (rows, 3, 32, 32))
    return np.concatenate([labels[:, None], images.astype(np.uint8).reshape(rows, -1)], axis=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number, file in enumerate(DATA.FILES):
        stripes(80, number).tofile(folder / file.name)
    return folder


def run(run_dir: Path, workers: int, *arguments: str) -> tuple[int, str]:
    words = ["run", "--devices", "cpu", "--workers", str(workers), "--run-dir", str(run_dir)]
    words += [str(EXAMPLE / "train.py"), *arguments]
    code, out, err = WARM.run(words, os.environ, 240)
    return code, out + err


def digests(run_dir: Path) -> tuple[str, str]:
    code, shown, err = WARM.run(["inspect", "--json", str(run_dir)], os.environ, 60)
    assert code == 0, err
    facts = json.loads(shown)
    return facts["digest"], facts["averaged_digest"]


def accuracies(said: str) -> tuple[float, float]:
    """With the averaged weights, with the plain ones."""
    found = re.search(r"test accuracy ([\d.]+), target .*\nwith the plain weights ([\d.]+)", said)
    assert found is not None, said
    return float(found[1]), float(found[2])


@pytest.mark.slow
def test_both_programs_learn_and_the_bits_do_not_depend_on_the_workers(
    data: Path, tmp_path: Path
) -> None:
    common = ("--data", str(data), "--epochs", "4")
    code, said = run(tmp_path / "one", 1, *common, "--target", "0.3")  # chance is 0.1
    assert code == 0, said
    assert "128 rows = 4 shards x 32 on 1 cpu worker (1 thread each), sync" in said
    code, said_by_two = run(tmp_path / "two", 2, *common, "--target", "1.01")
    assert code == 1, said_by_two
    assert accuracies(said_by_two) == accuracies(said)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    # It has no training loop of quorate: the command just runs it.
    words = ["run", str(EXAMPLE / "single.py"), *common, "--target", "0.3"]
    code, out, err = WARM.run(words, os.environ, 240)
    assert code == 0, out + err
    assert accuracies(out)[0] >= 0.3
    for each in (out, said):  # 16 updates
        assert re.search(STAMP + r"Session started\.$", each, re.MULTILINE)
        assert re.search(STAMP + r"Finished training\.$", each, re.MULTILINE)


def test_recipe_numbers_are_options(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    words = "--lr 0.1 --lr-decay 0.5 --decay-steps 2 --filters 4 6 --units 20 --l2 0.01"
    words += " --batch-size 150 --ema-decay 0.9 --steps 5 --seed 2 --threads 1"
    monkeypatch.setattr(sys, "argv", ["single.py", *words.split()])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        chosen = RECIPE.Recipe.of(RECIPE.parse("text", threads=True))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    net = chosen.network()
    assert [tuple(p.shape) for p in net.parameters() if p.dim() > 1] == [
        (4, 3, 5, 5), (6, 4, 5, 5), (20, 294), (10, 20),
    ]  # fmt: skip
    schedule = chosen.schedule(chosen.optimizer(net.parameters()))
    assert schedule.get_last_lr() == [0.1]
    train, _ = DATA.load(data)
    batches = list(chosen.batches(train))
    assert [len(labels) for _, labels in batches] == [150, 150, 100, 150, 150]
    expected = [*DATA.distorted(train, 150, 0, 2), *DATA.distorted(train, 150, 1, 2)][:5]
    for (images, _), (others, _) in zip(batches, expected, strict=True):
        assert torch.equal(images, others)
    assert RECIPE.Recipe(epochs=2).updates(400) == 8


def test_the_log_is_the_tutorials(capsys: pytest.CaptureFixture[str]) -> None:
    log = example.log.Log(2)
    for loss, right in ((1.25, 0.5), (0.123456789, 0.75)):
        log.step(loss, right)
    (line,) = capsys.readouterr().out.splitlines()
    told = "After 2 steps training, loss / accuracy on training batch is 0.123457 / 0.75."
    assert re.match(STAMP, line)
    assert line.endswith(told)


def test_the_programs_differ_in_few_lines_and_the_readme_shows_them() -> None:
    single, train = ((EXAMPLE / f"{n}.py").read_text().splitlines() for n in ("single", "train"))
    compared = list(difflib.unified_diff(single, train, n=0, lineterm=""))[2:]
    changed = [line for line in compared if line[0] in "+-"]
    assert 0 < len(changed) <= 40
    readme = (EXAMPLE / "README.md").read_text().splitlines()
    assert [line for line in changed if line not in readme] == []


def test_replicas_are_fed_disjoint_rows_that_make_up_the_batch() -> None:
    """The document's towers all computed the same batch."""
    rows, seen = 300, set()
    images = torch.from_numpy(stripes(rows, 0)[:, 1:]).view(rows, 3, 32, 32)

    def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        images, numbers = batch
        assert images.shape[1:] == (3, 28, 28)
        # A shard that is computed twice (a copy, the probe) is the same rows twice.
        seen.add(tuple(numbers.tolist()))
        return model(images.mean((2, 3))).mean()

    trainer = quorate.Trainer(
        nn.Linear(3, 1),
        loss,
        loading=quorate.Loading(augment=DATA.distort),
        shards=4,
        devices="cpu",
        workers=2,
        optimizer=quorate.Optimize(PLAIN.optimizer, ema_decay=PLAIN.ema_decay),
        batch_size=PLAIN.batch_size,
    )
    reports = list(trainer.updates(TensorDataset(images, torch.arange(rows))))
    assert [report.rows for report in reports] == [128, 128, 44]
    assert sorted(map(len, seen)) == [11] * 4 + [32] * 8
    assert sorted(number for shard in seen for number in shard) == list(range(rows))


def test_the_weights_are_regularised_once_and_the_biases_never() -> None:
    torch.manual_seed(0)
    model = MODEL.LeNet5()
    batch = [torch.randn(8, 3, 28, 28), torch.arange(8)]
    found = MODEL.loss(model, batch)
    weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    assert [*weights] == [f"{layer}.weight" for layer in ("conv1", "conv2", "dense1", "dense2")]
    penalty = sum(5e-5 * float(p.detach().double().square().sum()) for p in weights.values())
    difference = (found["loss"] - found["cross_entropy"]).item()
    assert difference == pytest.approx(penalty, rel=1e-4)
    both = torch.autograd.grad(found["loss"], [*model.parameters()], retain_graph=True)
    plain = torch.autograd.grad(found["cross_entropy"], [*model.parameters()])
    for (name, p), one, two in zip(model.named_parameters(), both, plain, strict=True):
        expected = 1e-4 * p if name in weights else torch.zeros_like(p)
        torch.testing.assert_close(one - two, expected.detach(), rtol=1e-3, atol=1e-7)

    def trained(shards: int) -> tuple[Any, nn.Module]:
        torch.manual_seed(0)
        trainer = quorate.Trainer(
            MODEL.LeNet5(),
            MODEL.loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            batch_size=8,
            shards=shards,
            devices="cpu",
        )
        (report,) = trainer.updates(TensorDataset(*batch), steps=1, shuffle=False)
        return report, trainer.model

    (one, model_one), (four, model_four) = trained(1), trained(4)
    assert four.metrics["loss"] - four.metrics["cross_entropy"] == pytest.approx(penalty, rel=1e-4)
    assert four.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-5)
    for a, b in zip(model_one.parameters(), model_four.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_rate_falls_by_a_hundredth_in_64_updates() -> None:
    optimizer = PLAIN.optimizer([nn.Parameter(torch.zeros(1))])
    schedule = PLAIN.schedule(optimizer)
    for n in range(129):
        assert schedule.get_last_lr()[0] == pytest.approx(1e-3 * 0.99 ** (n / 64))
        optimizer.step()
        schedule.step()
    assert PLAIN.ema_decay == 0.99


def test_evaluation_sees_the_middle_of_each_image_and_training_the_whole(data: Path) -> None:
    train, test = DATA.load(data)
    records = torch.from_numpy(np.fromfile(data / "test_batch.bin", dtype=np.uint8)).view(80, -1)
    whole = records[:, 1:].reshape(80, 3, 32, 32)
    middle = whole[:, :, 2:30, 2:30].double().flatten(1)
    expected = (middle - middle.mean(1, keepdim=True)) / middle.std(1, correction=0, keepdim=True)
    images, labels = test.tensors
    torch.testing.assert_close(images.double().flatten(1), expected, rtol=1e-5, atol=1e-5)
    assert labels.tolist() == records[:, 0].tolist()
    assert (train.tensors[0].dtype, tuple(train.tensors[0].shape)) == (
        torch.uint8,
        (400, 3, 32, 32),
    )
    first = torch.from_numpy(stripes(80, 0)[:, 1:]).view(80, 3, 32, 32)
    assert torch.equal(train.tensors[0][:80], first)
    rows = [labels for _, labels in DATA.distorted(train, 128, epoch=1)]
    assert [len(part) for part in rows] == [128, 128, 128, 16]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "got 0 bytes, expected a multiple of 3,073"),
        (b"\x01" * 3072, "got 3,072 bytes"),
        (b"\x01" * 3073 + b"\x0a" * 3073, "at byte 3,073: got label 10"),
    ],
)
def test_damaged_files_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        DATA.read(path)
    assert str(path) in str(caught.value)


class Here:
    """A source whose files are in a folder."""

    title = "here"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, files: Sequence[File], into: Path) -> None:
        for file in files:
            (into / file.name).write_bytes((self.folder / file.name).read_bytes())


def test_the_archive_and_the_pictures_give_the_same_files(data: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    with tarfile.open(sources / "cifar-10.tar", "w") as tar:
        for file in DATA.FILES:
            tar.add(data / file.name, f"cifar-10-batches-bin/{file.name}")
    labels = []
    for file in DATA.FILES:
        records = np.fromfile(data / file.name, dtype=np.uint8).reshape(-1, DATA.RECORD_BYTES)
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        picture = Image.fromarray(np.ascontiguousarray(pixels.reshape(-1, 1024, 3)))
        picture.save(sources / Path(file.name).stem, "PNG")
        labels.append(records[:, 0].tolist())
    (sources / DATA.LABELS[0]).write_text(json.dumps([n for part in labels[:5] for n in part]))
    (sources / DATA.LABELS[1]).write_text(json.dumps(labels[5]))
    for source in (DATA.Archive(Here(sources), "cifar-10.tar"), DATA.Pictures(Here(sources))):
        into = tmp_path / type(source).__name__
        into.mkdir()
        source.get(DATA.FILES[3:], into)
        assert sorted(path.name for path in into.iterdir()) == [f.name for f in DATA.FILES[3:]]
        for file in DATA.FILES[3:]:
            assert (into / file.name).read_bytes() == (data / file.name).read_bytes()


def test_the_real_files_are_read_as_they_are_known() -> None:
    path = cache_dir() / "cifar-10" / DATA.FILES[0].name
    if not path.exists():
        pytest.skip("CIFAR-10 is not cached")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DATA.FILES[0].sha256
    images, labels = DATA.read(path)
    assert labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]  # frog, truck, truck, deer, ...
    assert images[0, :, 0, 0].tolist() == [59, 62, 63]
    counts = [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert torch.bincount(labels).tolist() == counts
