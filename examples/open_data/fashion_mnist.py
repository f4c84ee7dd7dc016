"""Fashion-MNIST: 60,000 images of clothes to train on and 10,000 to test on, in ten even classes.

Han Xiao, Kashif Rasul and Roland Vollgraf, 2017, under the MIT licence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from open_data.fetch import fetch
from open_data.sources import File, Source
from open_data.sources.debian_package import DebianPackage
from open_data.sources.https import Https
from torch.utils.data import TensorDataset

from quorate.data import cache_dir
from quorate.data.labelled_images import read_idx_pair
from quorate.errors import DataError

CLASSES = 10

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

FILES = (
    File(TRAIN_IMAGES, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    File(TRAIN_LABELS, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    File(TEST_IMAGES, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    File(TEST_LABELS, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
)

_ADDRESS = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"
_IN_PACKAGE = "usr/share/datasets/fashion-mnist"

SOURCES: tuple[Source, ...] = (
    Https({file.name: f"{_ADDRESS}/{file.name}.gz" for file in FILES}),
    DebianPackage(
        "dataset-fashion-mnist", {file.name: f"{_IN_PACKAGE}/{file.name}.gz" for file in FILES}
    ),
)


def load(
    folder: str | Path | None = None, say: Callable[[str], None] = print
) -> tuple[TensorDataset, TensorDataset]:
    """Load the training and the test set.

    Args:
        folder: Where the four IDX files lie, plain or with .gz behind their names. They may be data
            of your own in the same format, so they are checked for sense but not for their content.
            It is only read. Without it the published files are used: cached, or fetched once.
        say: Gets a line when something was fetched.

    Returns:
        Two datasets of (images, labels): uint8 (N, 1, H, W), 28 x 28 in the published files, and
        int64 (N,), each from 0 to 9.

    Raises:
        DataError: a file is missing or damaged, the files do not fit each other, or nothing could
            be fetched.
    """
    if folder is None:
        source = fetch(
            "Fashion-MNIST",
            FILES,
            SOURCES,
            cache=cache_dir() / "fashion-mnist",
            licence="MIT",
            hint="(plain or .gz) into a folder, and name that folder",
            say=say,
        )
    else:
        source = Path(folder)
    return _pair(source, TRAIN_IMAGES, TRAIN_LABELS), _pair(source, TEST_IMAGES, TEST_LABELS)


def _pair(folder: Path, images_name: str, labels_name: str) -> TensorDataset:
    images, labels = read_idx_pair(_find(folder, images_name), _find(folder, labels_name), CLASSES)
    return TensorDataset(images.unsqueeze(1), labels)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(folder, got=f"no file {name}", expected="it, plain or with .gz behind its name")
