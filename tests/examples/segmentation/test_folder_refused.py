"""Folders of pictures that cannot be trained on: one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.picture_folder import COLOURS, SIZES, colours, load, truth, write

from quorate.errors import DataError


def _rename(root: Path) -> None:
    (root / "masks" / "2.png").rename(root / "masks" / "two.png")


def _narrow(root: Path) -> None:
    Image.fromarray(truth(1)[:, :-1]).save(root / "masks" / "1.png")


def _unknown_colour(root: Path) -> None:
    pixels = np.array(COLOURS, np.uint8)[truth(3)]
    pixels[5, 7] = (9, 8, 7)
    Image.fromarray(pixels).save(root / "masks" / "3.png")


def _unknown_number(root: Path) -> None:
    (root / "classes.csv").write_text("sky,0\nsea,1")


def _broken_image(root: Path) -> None:
    path = root / "images" / "0.png"
    path.write_bytes(path.read_bytes()[:200])


def _broken_mask(root: Path) -> None:
    (root / "masks" / "5.png").write_bytes(b"no picture")


def _deep(root: Path) -> None:
    Image.fromarray(np.zeros(SIZES[2], np.uint16)).save(root / "images" / "2.png")


def _twice(root: Path) -> None:
    Image.fromarray(colours(2)).save(root / "images" / "2.jpg")


def _no_names(root: Path) -> None:
    (root / "classes.csv").unlink()


def _empty(root: Path) -> None:
    for path in (root / "masks").iterdir():
        path.unlink()


def _few(root: Path) -> None:
    for number in (1, 2, 3):
        for name in ("images", "masks"):
            (root / name / f"{number}.png").unlink()


def _one_class(root: Path) -> None:
    for number, size in enumerate(SIZES):
        mask = np.zeros(size, np.uint8)
        mask[3] = 255
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")


@pytest.mark.parametrize(
    ("kind", "spoil", "told"),
    [
        ("palette", _rename, "masks: got no mask of 2.png, expected 2.png, or of another ending"),
        ("palette", _narrow, "1.png: got 32 x 40 pixels, expected 33 x 40 as "),
        ("colours", _unknown_colour, "3.png: got colour 9,8,7 in row 5, column 7, expected one of"),
        ("palette", _unknown_number, "0.png: got number 2 in row "),
        ("palette", _broken_image, "0.png: got image file is truncated"),
        ("palette", _broken_mask, "5.png: got cannot identify image file"),
        ("palette", _deep, "2.png: got pixels of mode I;16, expected 8 bits for each channel"),
        ("palette", _twice, "images: got 2.jpg and 2.png, expected one picture of each name"),
        ("colours", _no_names, "0.png: got colours (mode RGB), expected a channel of numbers"),
        ("palette", _empty, "masks: got no pictures, expected pictures named *"),
        ("palette", _few, "images: got 3 pictures, expected 5 or more"),
        ("palette", _one_class, "got 1 different numbers in the masks (0; 255 is ignored)"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_in_one_line(
    example: Any, tmp_path: Path, kind: str, spoil: Any, told: str
) -> None:
    root = write(tmp_path / "root", kind)
    spoil(root)
    with pytest.raises(DataError) as raised:
        load(example, root)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").rglob("*"))[1:]  # the folder that it would be in


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,0\nb", "line 2: got b, expected NAME,ID or"),
        ("a,0\nb,x", "line 2: got b,x"),
        ("a,0\na,1", "line 2: got a again"),
        ("a,0\nb,0", "line 2: got number 0 again"),
        ("a,1,2,3\nb,1,2,3", "line 2: got colour (1, 2, 3) again"),
        ("a,1,2,3\nb,1,2,300", "line 2: got colour (1, 2, 300)"),
        ("name,id\na,0", "got 1 classes, expected 2 to 128"),
        ("a,0\nb,1,2,3", "got lines of several forms"),
        ("", "got 0 classes"),
    ],
)
def test_a_bad_file_of_classes(example: Any, tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "classes.csv"
    path.write_text(text)
    with pytest.raises(DataError) as raised:
        example.classes_file.read(path, 32)
    assert told in str(raised.value)
    with pytest.raises(DataError, match="expected a file of classes"):
        example.classes_file.read(tmp_path / "none", 32)
