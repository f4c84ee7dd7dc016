"""examples/segmentation on folders of images and masks, and what is made of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.example_modules import EXAMPLES, main

import quorate
from quorate.errors import DataError, SettingError, UserError

FOLDER = EXAMPLES / "segmentation"
SIZES = ((70, 100), (40, 33), (64, 64), (20, 25), (96, 40), (50, 50))  # rows, columns
COLOURS = ((0, 0, 0), (200, 10, 10), (10, 200, 10))


def truth(number: int) -> np.ndarray:
    """The classes of a picture, 0 to 2."""
    draw = np.random.default_rng(number)
    rows, columns = SIZES[number]
    coarse = draw.integers(0, 3, (-(-rows // 8), -(-columns // 8)))
    return np.kron(coarse, np.ones((8, 8), int))[:rows, :columns].astype(np.uint8)


def colours(number: int) -> np.ndarray:
    """A picture in which the classes can be told apart."""
    base = np.array([(40, 60, 200), (220, 180, 60), (60, 160, 60)], np.uint8)
    noise = np.random.default_rng(number).integers(0, 20, (*SIZES[number], 3), np.uint8)
    pixels: np.ndarray = base[truth(number)] + noise
    return pixels


def write(root: Path, kind: str, many: int = len(SIZES)) -> Path:
    """A root with images/ and masks/; masks by number, with a palette, or by colour."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for number in range(many):
        Image.fromarray(colours(number)).save(root / "images" / f"{number}.png")
        classes = truth(number)
        made = {
            "numbers": lambda c: Image.fromarray(np.array([3, 7, 255], np.uint8)[c]),
            "palette": lambda c: Image.fromarray(c),
            "colours": lambda c: Image.fromarray(np.array(COLOURS, np.uint8)[c]),
        }[kind](classes)
        if kind == "palette":
            made.putpalette(np.array(COLOURS, np.uint8).tobytes())
        made.save(root / "masks" / f"{number}.png")
    if kind == "colours":
        lines = ["name,r,g,b", *(f"c{k},{r},{g},{b}" for k, (r, g, b) in enumerate(COLOURS))]
        (root / "classes.csv").write_text("\n".join(lines))
    return root


def load(example: Any, root: Path, **more: Any) -> tuple[Any, Any]:
    found = example.folder.splits(root, None, None, more.pop("hold_out", 5))
    assert found is not None
    common = {"colour": True, "side": 32, "classes": example.folder.classes_of(root)}
    return example.folder.load(*found, **(common | more))


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


def test_what_options_mean_together(example: Any, tmp_path: Path) -> None:
    splits = example.folder.splits
    assert splits(None, None, None, 5) is None
    assert splits(tmp_path, None, None, 5) is None
    for root, images, masks in ((None, tmp_path, None), (tmp_path, tmp_path, tmp_path)):
        with pytest.raises(SettingError, match="--images and --masks together"):
            splits(root, images, masks, 5)
    with pytest.raises(SettingError, match="--hold-out"):
        splits(tmp_path, None, None, 1)
    folders, many = splits(None, tmp_path / "a", tmp_path / "b", 3)
    assert (folders.images, folders.masks, many) == (tmp_path / "a", tmp_path / "b", 3)
    (tmp_path / "train" / "images").mkdir(parents=True)
    with pytest.raises(DataError, match="got train/images alone"):
        splits(tmp_path, None, None, 5)


@pytest.mark.slow
def test_a_folder_is_trained_on_drawn_and_exported(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    root, run_dir = write(tmp_path / "root", "colours"), tmp_path / "run"
    arguments = ("--data", root, "--colour", "--side", 32, "--updates", 6, "--batch-size", 8)
    more = ("--ema-decay", 0.5, "--widths", 8, 12, 16, 16, "--seed", 3, "--run-dir", run_dir)
    assert main(example.single, monkeypatch, *arguments, *more) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[-5:-1]] == ["c0", "c1", "c2", "mean"]
    assert main(example.single, monkeypatch, *arguments, *more, "--target", 1.1) == 1

    picture = root / "images" / "0.png"
    assert main(example.predict, monkeypatch, run_dir, picture) == 0
    assert "c0 " in capsys.readouterr().out
    with Image.open(root / "images" / "0.classes.png") as drawn:
        assert drawn.size == (100, 70)
        assert drawn.getpalette()[:9] == [value for colour in COLOURS for value in colour]

    for image in ((), (picture,)):
        assert main(example.export, monkeypatch, run_dir, *image) == 0
        lines = capsys.readouterr().out.splitlines()
        shapes = [line.partition(":")[0] for line in lines[-4:]]
        sizes = [(1, 64), (2, 64), (5, 64), (2, 96)]
        assert shapes == [f"({many}, 3, {side}, {side})" for many, side in sizes]
    program = torch.export.load(run_dir / "model.pt2").module()
    model = example.model.network_of(run_dir)
    batch = torch.randint(0, 256, (3, 3, 128, 64), dtype=torch.uint8)
    torch.testing.assert_close(program(batch), model(batch))
    with torch.no_grad():
        model.head.bias += 1
    assert not example.export.compared(model, program, [batch])

    (run_dir / "legend.json").write_text('{"side": 32, "classes": []}')
    with pytest.raises(DataError, match="got 0 classes, expected 3"):
        example.legend.of_run(run_dir, 3)
    (run_dir / "legend.json").write_text("{}")
    assert main(example.predict, monkeypatch, run_dir, picture) == 2
    assert main(example.export, monkeypatch, tmp_path) == 2


def test_recipe_numbers_are_options(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--lr 0.01 --weight-decay 0.1 --rise 0.5 --batch-size 64 --shard-rows 8 --updates 20"
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    recipe = example.recipe.Recipe.of(example.recipe.parse("text"))
    assert recipe.shards == 8
    optimizer = recipe.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    schedule = recipe.schedule(optimizer)
    rates = []
    for _ in range(20):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(0.01, rel=0.02)
    assert 8 <= rates.index(max(rates)) <= 11
    monkeypatch.setattr(sys, "argv", ["train.py", "--side", "100"])
    with pytest.raises(UserError, match="--side: got 100, expected a multiple of 32"):
        example.recipe.parse("text")


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


@pytest.mark.slow
def test_equal_rows_notes_what_batches_lacked(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    draw = np.random.default_rng(2)
    earth = tmp_path / "earth"
    earth.mkdir()
    zones = np.kron(draw.integers(1, 33, (5, 32)), np.ones((64, 64))).astype(np.uint8)
    Image.fromarray(zones).save(earth / "zones.png")
    Image.fromarray(zones * 7).convert("RGB").save(earth / "bmng.jpg")
    out = tmp_path / "out.jsonl"
    words = (
        f"--rows 128 --batch-sizes 16 32 --seeds 4 --tested 8 --every 32 --closely 2 --out {out} "
        "--side 32 --lr 0.001 0.002 --constant"
    )
    assert main(example.equal_rows, monkeypatch, *words.split(), "--data", earth) == 0
    said = capsys.readouterr().out
    assert "16 tiles, 8 updates, rate 0.001, seed 4" in said
    small, large = (json.loads(line) for line in out.read_text().splitlines())
    assert (small["updates"], large["updates"]) == (8, 4)
    assert sum(small["lacking"]) == 8
    assert sum(large["lacking"]) == 4
    lacked = sum(n * many for n, many in enumerate(small["lacking"])) / 8
    assert lacked == pytest.approx(sum(small["lacks"]))
    for one in (small, large):
        assert [point[0] for point in one["curve"]] == [32, 64, 96, 128]
        assert all(-1.001 <= value <= 1.001 for value in one["cosines"])
    assert [point[0] for point in small["closely"]] == [4, 5, 6]
    assert len(small["cosines"]) == 7

    # The rows of each update are those that a trainer takes.
    train, _ = example.tiles.load(earth, colour=True, side=32, groups=8, many=1)
    rows: dict[int, Any] = {}

    def loss(model: Any, batch: Any, at: Any) -> Any:
        rows[at.step] = batch[0]
        return model(batch[0].float()[:, None]).mean()

    trainer = quorate.Trainer(
        torch.nn.Linear(1, 1),
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch_size=16,
        shards=1,
        seed=4,
        devices="cpu",
        workers=quorate.Workers(engine="towers"),
    )
    numbers = torch.utils.data.TensorDataset(torch.arange(len(train)))
    assert len(list(trainer.updates(numbers, steps=8))) == 8
    assert len(rows) == 8
    found = np.array(list(example.equal_rows._classes_of_batches(train, 16, 4, 8)))
    for has, taken in zip(found, (rows[step] for step in sorted(rows)), strict=True):
        classes = {k for row in taken for k in train[int(row)][1].unique().tolist()} - {255}
        assert set(np.flatnonzero(has).tolist()) == classes
    assert not found.all()  # else it would show nothing
    assert small["close_has"] == found[4:6].tolist()

    # In a process of its own: matplotlib keeps its fonts open.
    words = [sys.executable, str(FOLDER / "equal_rows_plot.py"), str(out), str(tmp_path / "p.png")]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line[:14] for line in lines[2:]] == ["| 16 | 8 | 0.0", "| 32 | 4 | 0.0"]
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.size[0] > 500
