"""examples/segmentation on folders of images and masks, and what is made of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.example_modules import main
from support.picture_folder import COLOURS, SIZES, colours, load, truth, write


@pytest.mark.parametrize("kind", ["numbers", "palette", "colours"])
def test_each_kind_of_mask_gives_the_same_classes(example: Any, tmp_path: Path, kind: str) -> None:
    said: list[str] = []
    train, _ = load(example, write(tmp_path / "root", kind), say=said.append)
    names = {
        "numbers": ("class 3", "class 7"),
        "palette": ("class 0", "class 1", "class 2"),
        "colours": ("c0", "c1", "c2"),
    }[kind]
    assert train.legend.names == names
    if kind != "numbers":
        assert train.legend.colours == COLOURS
    for number, level in enumerate(train.levels):
        rows, columns = SIZES[number]
        assert (level.height, level.width) == (rows, columns)
        expected = truth(number)
        if kind == "numbers":
            expected[expected == 2] = 255  # which is ignored
        assert np.array_equal(level.classes[:rows, :columns].numpy(), expected)
        assert (level.classes[rows:] == 255).all()
        assert (level.classes[:, columns:] == 255).all()
        assert np.array_equal(
            level.pixels[:, :rows, :columns].numpy().transpose(1, 2, 0), colours(number)
        )
    assert len(said) == 1
    assert said[0].startswith("6 pictures, ")


def test_every_fifth_picture_is_held_out_and_covered_once(example: Any, tmp_path: Path) -> None:
    root = write(tmp_path / "root", "palette")
    train, test = load(example, root)
    assert {tile.level for tile in test.places} == {4}
    assert {tile.level for tile in train.places} == {0, 1, 2, 3, 5}
    for tiles, least in ((train, 1), (test, 1)):
        for k in {tile.level for tile in tiles.places}:
            seen = torch.zeros_like(tiles.levels[k].classes, dtype=torch.int64)
            for tile in tiles.places:
                if tile.level == k:
                    seen[tile.row : tile.row + 32, tile.column : tile.column + 32] += 1
            rows, columns = SIZES[k]
            assert (seen[:rows, :columns] >= least).all()
            if tiles is test:
                assert (seen == 1).all()
    for tiles in (train, test):
        for number in range(len(tiles)):
            pixels, classes, level = tiles[number]
            assert (pixels.shape, classes.shape, level) == ((3, 32, 32), (32, 32), 0)
    assert len(set(train.places)) == len(train.places)


def test_a_split_by_folders_names_below_folders_and_suffixes(example: Any, tmp_path: Path) -> None:
    write(tmp_path / "root" / "train", "palette", 3)
    write(tmp_path / "root" / "val", "palette", 2)
    for part in ("train", "val"):
        masks = tmp_path / "root" / part / "masks"
        images = tmp_path / "root" / part / "images"
        for folder, suffix in ((masks, "_L"), (images, "")):
            (folder / "town").mkdir()
            (folder / "1.png").rename(folder / "town" / f"1{suffix}.png")
        (masks / "0.png").rename(masks / "0_L.png")
        if part == "train":
            (masks / "2.png").rename(masks / "2_L.png")
        (masks / "note.txt").write_text("")
    train, test = load(example, tmp_path / "root", mask_suffix="_L")
    assert {tile.level for tile in train.places} == {0, 1, 2}
    assert {tile.level for tile in test.places} == {3, 4}
    assert np.array_equal(train.levels[2].classes[:40, :33].numpy(), truth(1))  # town/1, the last


def test_pictures_are_decoded_once_and_again_when_one_has_changed(
    example: Any, tmp_path: Path
) -> None:
    root = write(tmp_path / "root", "palette")
    load(example, root)
    load(example, root, say=pytest.fail)
    path = root / "masks" / "0.png"
    with Image.open(path) as mask:
        Image.fromarray(2 - np.asarray(mask)).save(path)
    os.utime(path, ns=(1, 1))
    said: list[str] = []
    train, _ = load(example, root, say=said.append)
    assert len(said) == 1
    assert np.array_equal(train.levels[0].classes[:70, :100].numpy(), 2 - truth(0))


def test_a_file_of_numbers_and_colours(example: Any, tmp_path: Path) -> None:
    path = tmp_path / "classes.csv"
    path.write_text("name,id,r,g,b\nsky,4,1,2,3\nignored,9,0,0,0\nsea,300,4,5,6\n")
    key = example.classes_file.read(path, 64)
    assert key.legend.names == ("sky", "sea")
    assert key.ids == {4: 0, 9: 255, 300: 1}
    assert key.colours == {0x010203: 0, 0: 255, 0x040506: 1}
    deep = np.array([[4, 9], [300, 4]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")  # numbers above 255
    assert example.masks.classes(tmp_path / "deep.png", key).tolist() == [[0, 255], [1, 0]]
    shown = np.array([[(4, 5, 6), (0, 0, 0)]], np.uint8)
    Image.fromarray(shown).save(tmp_path / "shown.png")
    assert example.masks.classes(tmp_path / "shown.png", key).tolist() == [[1, 255]]


def test_the_table(example: Any) -> None:
    legend = example.legend.Legend(("sea", "dry land"), COLOURS[:2])
    found = {"sea_iou": 0.5, "dry_land_iou": float("nan"), "mean_iou": 0.5}
    before = {"sea_iou": 0.25, "dry_land_iou": 0.5, "mean_iou": 0.375}
    assert example.table.table(found, legend, 1, before).splitlines() == [
        "             IoU  change",
        "sea        0.500  +0.250",
        "dry land       -       -",
        "mean       0.500  +0.125",
    ]


def test_groups_of_zones_agree_and_have_each_zone_once(example: Any) -> None:
    for groups in example.data.GROUPS.values():
        zones = [zone for group in groups for zone in group.zones]
        assert sorted(zones) == list(range(1, 33))
    four, eight = (example.data.class_of_zone(many) for many in (4, 8))
    pairs = set(zip(eight[1:33].tolist(), four[1:33].tolist(), strict=True))
    assert len(pairs) == 8  # each of the eight is within one of the four
    assert (four[33:] == 255).all()
    assert four[0] == eight[0] == 255


def test_the_earth_cut_into_a_folder_is_read_as_it_was(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(1)
    earth = tmp_path / "earth"
    earth.mkdir()
    zones = np.kron(draw.integers(0, 33, (7, 30)), np.ones((50, 60))).astype(np.uint8)
    Image.fromarray(zones).save(earth / "zones.png")
    picture = Image.fromarray(draw.integers(0, 255, zones.shape, np.uint8)).convert("RGB")
    picture.save(earth / "bmng.jpg")
    for more in ((), ("--by-colour",)):
        root = tmp_path / f"root{len(more)}"
        assert main(example.cut, monkeypatch, root, "--data", earth, *more) == 0
        assert main(example.cut, monkeypatch, root, "--data", earth) == 2  # is there
        train, test = load(example, root, side=64)
        assert train.legend.names == tuple(g.name for g in example.data.GROUPS[8])
        counts = np.zeros(256, int)
        for level in train.levels:
            inside = level.classes[: level.height, : level.width]
            counts += np.bincount(inside.reshape(-1).numpy(), minlength=256)
        expected = np.bincount(example.data.class_of_zone(8)[zones].reshape(-1), minlength=256)
        assert (counts == expected).all()
        assert len(test) > 0
