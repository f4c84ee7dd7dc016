"""examples/segmentation on small made images: tiles, folders, loss and metrics, programs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import example_data
from support.example_modules import EXAMPLES, example_modules, main

SIZES = ((70, 100), (40, 33), (64, 64), (20, 25), (96, 40), (50, 50))  # rows, columns


COLOURS = ((0, 0, 0), (200, 10, 10), (10, 200, 10))


def truth(number: int) -> np.ndarray:
    """The classes of a picture, 0 to 2."""
    draw = np.random.default_rng(number)
    rows, columns = SIZES[number]
    coarse = draw.integers(0, 3, (-(-rows // 8), -(-columns // 8)))
    return np.kron(coarse, np.ones((8, 8), int))[:rows, :columns].astype(np.uint8)


def colours(number: int) -> np.ndarray:
    """Return a picture with distinguishable classes."""
    base = np.array([(40, 60, 200), (220, 180, 60), (60, 160, 60)], np.uint8)
    noise = np.random.default_rng(number).integers(0, 20, (*SIZES[number], 3), np.uint8)
    pixels: np.ndarray = base[truth(number)] + noise
    return pixels


def write(root: Path) -> Path:
    """Write images/, masks/ by colour, and the classes of colours."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for number in range(len(SIZES)):
        Image.fromarray(colours(number)).save(root / "images" / f"{number}.png")
        mask = np.array(COLOURS, np.uint8)[truth(number)]
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
    lines = ["name,r,g,b", *(f"c{k},{r},{g},{b}" for k, (r, g, b) in enumerate(COLOURS))]
    (root / "classes.csv").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with example_modules(EXAMPLES / "segmentation") as files:
        yield files


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUORATE_DATA", str(tmp_path / "cache"))


# --- tiles ----------------------------------------------------------------------------------------


def coverage(tiles: Any, level: int, side: int) -> torch.Tensor:
    """Return how many tiles of a level each pixel is in."""
    seen = torch.zeros_like(tiles.levels[level].classes, dtype=torch.int64)
    for tile in tiles.places:
        if tile.level == level:
            seen[tile.row : tile.row + side, tile.column : tile.column + side] += 1
    return seen


def test_held_out_bands_are_covered_once_and_never_trained_on(example: Any, tmp_path: Path) -> None:
    example_data.earth(tmp_path)
    train, test = example.tiles.load(tmp_path)
    for k, level in enumerate(test.levels[: test.tested]):
        seen = coverage(test, k, 256)
        left, right = 1536 >> k, 2048 >> k  # the fourth band of four
        assert (seen[: level.height, left:right] == 1).all()
        assert (seen[:, :left] == 0).all()
        assert (level.classes[level.height :] == example.data.IGNORED).all()
    assert all(tile.column + 256 <= 1536 >> tile.level for tile in train.places)
    assert len(set(train.places)) == len(train.places)
    # Tiles are views of a single mapped image.
    for tiles in (train, test):
        for number in range(len(tiles)):
            pixels, classes, level = tiles[number]
            assert (pixels.shape, classes.shape) == ((1, 256, 256), (256, 256))
            whole = tiles.levels[level]
            for view, storage in ((pixels, whole.pixels), (classes, whole.classes)):
                assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    again, _ = example.tiles.load(tmp_path)  # from the cache
    assert torch.equal(again[3][0], train[3][0])


# --- folders of pictures --------------------------------------------------------------------------


def test_a_folder_is_read_and_every_fifth_picture_is_held_out(example: Any, tmp_path: Path) -> None:
    said: list[str] = []
    root, folder = write(tmp_path / "root"), example.folder
    options = {"colour": True, "side": 32, "classes": folder.classes_of(root), "say": said.append}
    train, test = folder.load(*folder.splits(root, None, None, 5), **options)
    assert (train.legend.names, train.legend.colours) == (("c0", "c1", "c2"), COLOURS)
    for number, level in enumerate(train.levels):
        rows, columns = SIZES[number]
        assert np.array_equal(level.classes[:rows, :columns].numpy(), truth(number))
        assert (level.classes[rows:] == 255).all()
        assert (level.classes[:, columns:] == 255).all()
        pixels = level.pixels[:, :rows, :columns].numpy().transpose(1, 2, 0)
        assert np.array_equal(pixels, colours(number))
    (line,) = said
    assert line.startswith("6 pictures, ")
    assert {tile.level for tile in test.places} == {4}
    assert {tile.level for tile in train.places} == {0, 1, 2, 3, 5}
    assert (coverage(test, 4, 32) == 1).all()
    for k in (0, 1, 2, 3, 5):
        assert (coverage(train, k, 32)[: SIZES[k][0], : SIZES[k][1]] >= 1).all()


# --- loss and metrics -----------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """Returns its given logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


def test_the_loss_is_a_mean_over_class_weights_and_exact_over_shards(example: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = [0.5, 2.0, 1.0, 0.0]
    classes = torch.randint(0, 4, (6, 8, 8), generator=draw, dtype=torch.uint8)
    classes[0], classes[1, :5] = 255, 255  # a tile and half a tile without weight
    images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    model = Fixed(torch.randn(6, 4, 8, 8, generator=draw))
    loss, levels = example.loss.loss_with(weights, 2), torch.zeros(6, dtype=torch.int64)
    nats = -model.logits.detach().log_softmax(1)
    places = torch.nonzero(classes != 255).tolist()
    counts = [weights[int(classes[b, r, c])] for b, r, c in places]
    wanted = sum(
        weight * float(nats[b, int(classes[b, r, c]), r, c])
        for weight, (b, r, c) in zip(counts, places, strict=True)
    ) / sum(counts)
    whole = loss(model, (images, classes, levels))
    assert whole["weight"].item() == sum(counts)
    assert whole["loss"].item() == pytest.approx(wanted, rel=1e-5)
    parts = [loss(model, (images[i], classes[i], levels[i])) for i in (slice(1, 2), slice(2, 6))]
    total = sum(part["loss"].item() * part["weight"].item() for part in parts)
    assert total / sum(counts) == pytest.approx(wanted, rel=1e-5)
    assert loss(model, (images[:1], classes[:1], levels[:1]))["weight"] == 0


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_is_trained_on_drawn_and_exported(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    root, run_dir = write(tmp_path / "root"), tmp_path / "run"
    arguments = ("--data", root, "--colour", "--side", 32, "--updates", 2, "--batch-size", 8)
    more = ("--ema-decay", 0.5, "--widths", 8, 12, 16, 16, "--seed", 3, "--run-dir", run_dir)
    assert main(example.single, monkeypatch, *arguments, *more) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[-5:-1]] == ["c0", "c1", "c2", "mean"]

    image = root / "images" / "0.png"
    assert main(example.predict, monkeypatch, run_dir, image) == 0
    assert "c0 " in capsys.readouterr().out
    with Image.open(root / "images" / "0.classes.png") as drawn:
        assert drawn.size == (100, 70)
        assert drawn.getpalette()[:9] == [value for colour in COLOURS for value in colour]

    assert main(example.export, monkeypatch, run_dir, image) == 0
    shapes = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[-4:]]
    sizes = [(1, 64), (2, 64), (5, 64), (2, 96)]
    assert shapes == [f"({many}, 3, {side}, {side})" for many, side in sizes]
    program = torch.export.load(run_dir / "model.pt2").module()
    model = example.model.network_of(run_dir)
    batch = torch.randint(0, 256, (3, 3, 128, 64), dtype=torch.uint8)
    torch.testing.assert_close(program(batch), model(batch))
    (run_dir / "legend.json").write_text("{}")
    assert main(example.predict, monkeypatch, run_dir, image) == 2
    assert main(example.export, monkeypatch, tmp_path) == 2
