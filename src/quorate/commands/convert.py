"""``quorate convert``: converts labelled images to a TFRecord file."""

from __future__ import annotations

from pathlib import Path

import click

from quorate.commands.command import Command
from quorate.machine.regular_file import exists

HELP = """Convert labelled images to a TFRecord file with the features image_raw and label.

SOURCES are two IDX files, images and labels (plain or .gz), or one .npz file with both. TARGET is
the file to write.
"""


@click.command(
    "convert", cls=Command, help=HELP, short_help="convert labelled images to a TFRecord file"
)
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--rows",
    metavar="START:END",
    help="convert only rows START to END - 1, counted from 0 (default: all)",
)
@click.option("--overwrite", is_flag=True, help="replace TARGET if the file exists")
def command(sources: tuple[Path, ...], target: Path, rows: str | None, overwrite: bool) -> int:
    """Read, check and write the images, and print a summary.

    Raises:
        DataError: a source is missing or damaged, or the target cannot be written.
        SettingError: an option is not valid.
    """
    from quorate.data.labelled_images import LabelledImages, read_idx_pair, read_npz
    from quorate.data.tfrecord.images import read_images, write_images
    from quorate.errors import DataError, SettingError

    if exists(target) and not overwrite:
        raise SettingError("target", str(target), "a new file", "name another, or --overwrite")
    if len(sources) == 2:
        content = read_idx_pair(*sources)
    elif len(sources) == 1 and sources[0].suffix == ".npz":
        content = read_npz(sources[0])
    else:
        given = " ".join(map(str, sources))
        raise SettingError("sources", given, "images and labels, or one .npz", "name them first")
    chosen = _rows(rows, len(content.labels))
    content = LabelledImages(content.images[chosen], content.labels[chosen])
    try:
        count = write_images(target, content)
    except OSError as error:
        got = error.strerror or error
        raise DataError(target, got=got, expected="a file that can be written") from error
    shape = tuple(content.images.shape[1:])
    read_images(target, shape)[count - 1]  # builds the index, and verifies the last record
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
