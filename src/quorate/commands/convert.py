"""``quorate convert``: labelled images of other formats into a TFRecord file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "convert",
        help="make a TFRecord file of labelled images",
        description=f"{__doc__} Its features are image_raw and label.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="source",
        help="two IDX files, images and labels (plain or .gz); or one .npz with both",
    )
    parser.add_argument("target", type=Path, help="the file to write")
    parser.add_argument("--rows", metavar="START:END", help="only these, counted from 0")
    parser.add_argument("--overwrite", action="store_true", help="replace the target")
    parser.set_defaults(call=convert)


def convert(options: argparse.Namespace) -> int:
    """Read, check, write, and say what was written.

    Raises:
        DataError: a source is missing or damaged, or the target cannot be written.
        SettingError: an option cannot work.
    """
    from quorate.data.labelled_images import LabelledImages, read_idx_pair, read_npz
    from quorate.data.tfrecord.images import read_images, write_images
    from quorate.errors import DataError, SettingError

    sources, target = options.sources, options.target
    if target.exists() and not options.overwrite:
        raise SettingError("target", str(target), "a new file", "name another, or --overwrite")
    if len(sources) == 2:
        content = read_idx_pair(*sources)
    elif len(sources) == 1 and sources[0].suffix == ".npz":
        content = read_npz(sources[0])
    else:
        given = " ".join(map(str, sources))
        raise SettingError("sources", given, "images and labels, or one .npz", "name them first")
    rows = _rows(options.rows, len(content.labels))
    content = LabelledImages(content.images[rows], content.labels[rows])
    try:
        count = write_images(target, content)
    except OSError as error:
        got = error.strerror or error
        raise DataError(target, got=got, expected="a file that can be written") from error
    shape = tuple(content.images.shape[1:])
    read_images(target, shape)[count - 1]  # it is indexed now, and its last record is right
    print(
        f"{target}: {count:,} records, {target.stat().st_size / 1e6:,.1f} MB; image_raw: bytes of "
        f"shape {shape}; label: int64 from {content.labels.min()} to {content.labels.max()}"
    )
    return 0


def _rows(given: str | None, count: int) -> slice:
    from quorate.errors import SettingError

    start, colon, end = (given or ":").partition(":")
    try:
        rows = slice(int(start or 0), int(end or count))
    except ValueError:
        rows = slice(0, 0)
    if not colon or not 0 <= rows.start < rows.stop <= count:
        fix = "give the first and the one behind the last"
        raise SettingError("--rows", given, f"START:END within 0:{count}", fix)
    return rows
