"""examples/segmentation on small made images."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.example_modules import main
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import quorate
from quorate.data.draws import Draws
from quorate.errors import DataError, UserError

ZONE_OF = np.array([32, 6, 12, 30, 0], np.uint8)  # of the classes in order; and of none


@pytest.fixture(scope="module")
def earth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2048 x 300 pixels: four classes, of which stripes and squares tell two of like brightness."""
    folder = tmp_path_factory.mktemp("earth")
    draw = np.random.default_rng(3)
    classes = np.kron(draw.integers(0, 4, (5, 32)), np.ones((60, 64))).astype(np.uint8)
    row, column = np.indices(classes.shape)
    looks = [
        np.full(classes.shape, 40),
        90 + 60 * (row // 4 % 2),
        90 + 60 * ((row // 4 + column // 4) % 2),
        np.full(classes.shape, 220),
    ]
    grey = np.choose(classes, looks) + draw.normal(0, 5, classes.shape)
    zones = ZONE_OF[classes]
    zones[:5] = 0
    picture = Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    picture.save(folder / "bmng.jpg", quality=95)
    Image.fromarray(zones).save(folder / "zones.png")
    return folder


# --- tiles ----------------------------------------------------------------------------------------


def test_tiles_are_views_of_one_mapped_image(example: Any, earth: Path) -> None:
    train, test = example.tiles.load(earth)
    for tiles in (train, test):
        for number in range(len(tiles)):
            pixels, classes, level = tiles[number]
            assert pixels.shape == (1, 256, 256)
            assert classes.shape == (256, 256)
            whole = tiles.levels[level]
            for view, storage in ((pixels, whole.pixels), (classes, whole.classes)):
                assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    again, _ = example.tiles.load(earth)  # from the cache
    assert torch.equal(again[3][0], train[3][0])


def test_held_out_bands_are_covered_once_and_never_trained_on(example: Any, earth: Path) -> None:
    train, test = example.tiles.load(earth)
    for k, level in enumerate(test.levels[: test.tested]):
        seen = torch.zeros_like(level.classes, dtype=torch.int64)
        for tile in test.places:
            if tile.level == k:
                seen[tile.row : tile.row + 256, tile.column : tile.column + 256] += 1
        left, right = 1536 >> k, 2048 >> k  # the fourth band of four
        assert (seen[: level.height, left:right] == 1).all()
        assert (seen[:, :left] == 0).all()
        below = level.classes[level.height :]
        assert (below == example.data.IGNORED).all()
    assert all(tile.column + 256 <= 1536 >> tile.level for tile in train.places)
    assert len(set(train.places)) == len(train.places)


def test_smaller_images_are_means_and_masks_the_nearest(example: Any) -> None:
    pixels = np.array([[[0, 2, 9, 9, 7], [4, 6, 9, 10, 7]]], np.uint8)
    assert example.sizes._halved(pixels).tolist() == [[[3, 9]]]
    wide = np.zeros((1, 1, 2), np.uint8)
    assert example.data._centres(5, 2).tolist() == [1, 3]
    assert example.data._centres(2, 2).tolist() == [0, 1]
    assert example.sizes.padded(wide, 7, 256).shape == (1, 256, 256)


def test_scales_differ_and_each_has_its_tiles(example: Any, tmp_path: Path) -> None:
    Image.new("L", (2048, 600)).save(tmp_path / "bmng.jpg")
    zones = np.full((1200, 4096), 32, np.uint8)  # of twice the size
    zones[1, 1] = 6
    Image.fromarray(zones).save(tmp_path / "zones.png")
    train, _ = example.tiles.load(tmp_path)
    many = np.bincount([tile.level for tile in train.places])
    assert len(many) == 2
    assert many.min() > 4
    assert train.levels[0].classes[0, :2].tolist() == [1, 0]


def test_an_image_too_small_to_hold_a_band_out(example: Any, tmp_path: Path) -> None:
    Image.new("L", (1024, 512)).save(tmp_path / "bmng.jpg")
    Image.new("L", (1024, 512), 32).save(tmp_path / "zones.png")
    with pytest.raises(DataError, match="got 1024 x 512 pixels, expected at least 2048 x 256"):
        example.tiles.load(tmp_path)


def test_image_and_mask_are_turned_alike(example: Any) -> None:
    images = torch.randint(0, 255, (9, 1, 256, 256), dtype=torch.uint8)
    batch = (images, images[:, 0], torch.arange(9))
    turned, classes, levels = example.recipe.turned(batch, Draws(0, 1, np.arange(9)))
    assert torch.equal(turned[:, 0], classes)
    assert torch.equal(levels, batch[2])
    assert not torch.equal(turned, images)
    assert torch.equal(turned.flatten(1).sort().values, images.flatten(1).sort().values)


# --- bad data -------------------------------------------------------------------------------------


def test_bad_data_is_named_with_file_and_place(example: Any, tmp_path: Path) -> None:
    image, mask, data = tmp_path / "a.png", tmp_path / "m.png", example.data
    pixels = np.zeros((1, 30, 60), np.uint8)
    Image.new("L", (60, 40), 32).save(mask)
    with pytest.raises(DataError) as raised:
        data.mask(mask, pixels, image_path=image)
    assert f"{mask}: got 60 x 40 pixels, expected 60 x 30 as {image} has" in str(raised.value)

    zones = np.full((60, 120), 32, np.uint8)
    zones[17, 5] = 40
    Image.fromarray(zones).save(mask)
    with pytest.raises(DataError) as raised:
        data.mask(mask, pixels, image_path=image)
    assert f"{mask}: got zone 40 in row 17, column 5, expected zones from 1 to 32" in str(
        raised.value
    )

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(image)
    content = image.read_bytes()
    for broken in (content[: len(content) // 2], b"not a picture", b""):
        image.write_bytes(broken)
        with pytest.raises(DataError, match="expected a whole picture") as raised:
            data.image(image, colour=False)
        assert str(image) in str(raised.value)
    with pytest.raises(DataError, match="got no file, expected a picture"):
        data.image(tmp_path / "b.png", colour=True)
    with pytest.raises(DataError, match=r"got no file bmng\.jpg"):
        data.files(tmp_path)


# --- loss and metrics -----------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """Says what it was made with."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


def test_the_loss_is_a_mean_over_class_weights_and_exact_over_shards(example: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = [0.5, 2.0, 1.0, 0.0]
    classes = torch.randint(0, 4, (6, 8, 8), generator=draw, dtype=torch.uint8)
    classes[0], classes[1, :5] = 255, 255  # a tile that counts for nothing, and half of one
    images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    model = Fixed(torch.randn(6, 4, 8, 8, generator=draw))
    loss = example.loss.loss_with(weights, 2)
    levels = torch.zeros(6, dtype=torch.int64)
    whole = loss(model, (images, classes, levels))
    nats = -model.logits.detach().log_softmax(1)
    sums = [0.0, 0.0]
    for b, row, column in torch.nonzero(classes != 255).tolist():
        true = int(classes[b, row, column])
        sums[0] += weights[true] * float(nats[b, true, row, column])
        sums[1] += weights[true]
    assert whole["weight"].item() == sums[1]
    assert whole["loss"].item() == pytest.approx(sums[0] / sums[1], rel=1e-5)
    assert "confusion" not in whole
    parts = [loss(model, (images[i], classes[i], levels[i])) for i in (slice(1, 2), slice(2, 6))]
    total = sum(part["loss"].item() * part["weight"].item() for part in parts)
    assert total / sums[1] == pytest.approx(sums[0] / sums[1], rel=1e-5)
    assert loss(model, (images[:1], classes[:1], levels[:1]))["weight"] == 0


def earth_legend(example: Any) -> Any:
    names = tuple(group.name for group in example.data.GROUPS[4])
    return example.legend.Legend(names, example.legend.distinct(4))


def test_intersection_over_union_by_hand(example: Any) -> None:
    classes = torch.tensor([[[0, 0, 1, 255]], [[2, 3, 3, 3]]])
    guesses = torch.tensor([[[0, 1, 1, 2]], [[2, 3, 0, 3]]])
    matrix = example.loss.confusion(guesses, classes, torch.tensor([0, 1]), (2, 4))
    assert matrix.sum() == 7
    found = example.loss.iou(matrix, earth_legend(example))
    assert found["water_iou_0"] == pytest.approx(1 / 2)
    assert found["arid_iou"] == pytest.approx(1 / 2)
    assert found["water_iou"] == pytest.approx(1 / 3)  # of 0, 0 and the 3 that is taken for one
    assert found["polar_iou_1"] == pytest.approx(2 / 3)
    assert found["mean_iou"] == pytest.approx((1 / 3 + 1 / 2 + 1 + 2 / 3) / 4)
    assert math.isnan(found["polar_iou_0"])  # neither there nor guessed
    assert found["mean_iou_0"] == pytest.approx((1 / 2 + 1 / 2) / 2)  # of the two that are there


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_gives_the_same_on_any_towers_and_shows_what_it_does(
    example: Any, earth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, kind = [], example.train.quorate.Trainer
    short = ("--data", earth, "--updates", 2, "--batch-size", 4, "--target", 0)
    for workers in (1, 3):
        run_dir = tmp_path / f"towers-{workers}"
        monkeypatch.setattr(example.train.quorate, "Trainer", _with(kind, workers))
        assert main(example.train, monkeypatch, *short, "--run-dir", run_dir) == 0
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        logs.append([{n: v for n, v in line.items() if n in KEPT} for line in lines])
    assert logs[0] == logs[1]
    assert 0 < logs[0][-1]["validation"]["mean_iou"] < 1
    with Image.open(run_dir / "overlays" / "step-000002.png") as shown:
        assert shown.size == (3 * 260 - 4, 4 * 260 - 4)
    events = EventAccumulator(str(run_dir / "summaries"), {"images": 0}).Reload()
    assert [each.step for each in events.Images("overlays")] == [2]

    # The same run is over, and only evaluated. It is what another can be compared with.
    again = (*short, "--run-dir", run_dir)
    assert main(example.train, monkeypatch, *again, "--above", run_dir) == 1  # not 0.15 above
    assert main(example.train, monkeypatch, *again, "--above", run_dir, "--margin", 0) == 0
    assert main(example.train, monkeypatch, *again, "--target", 0.99) == 1
    with pytest.raises(DataError, match=r"run train\.py --baseline"):
        main(example.train, monkeypatch, *short, "--above", tmp_path / "none")


KEPT = ("global_step", "loss", "weight", "validation")


def _with(kind: Any, workers: int) -> Any:
    towers = quorate.Workers(workers, engine="towers")
    mine = {"shards": 3, "devices": "cpu", "workers": towers}
    return lambda *args, **options: kind(*args, **(options | mine))


def test_single_and_predict(
    example: Any, earth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir, image = tmp_path / "run", tmp_path / "small.png"
    arguments = ("--data", earth, "--updates", 2, "--batch-size", 4, "--run-dir", run_dir)
    assert main(example.single, monkeypatch, *arguments, "--target", 0, "--colour") == 0
    assert "other land" in capsys.readouterr().out
    Image.new("RGB", (90, 70), (9, 99, 200)).save(image)
    assert main(example.predict, monkeypatch, run_dir, image) == 0
    with Image.open(tmp_path / "small.classes.png") as classes:
        assert classes.size == (90, 70)
        assert np.asarray(classes).max() < 4
    with Image.open(tmp_path / "small.overlay.png") as shown:
        assert shown.size == (90, 70)
    image.write_bytes(b"broken")
    assert main(example.predict, monkeypatch, run_dir, image) == 2
    assert main(example.predict, monkeypatch, tmp_path, image) == 2


@pytest.mark.parametrize(("channels", "size"), [(1, (300, 700)), (3, (60, 500)), (1, (256, 257))])
def test_overlapping_tiles_are_the_whole_image(
    example: Any, channels: int, size: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    model = example.model.OnePixel(channels, 5)
    pixels = np.random.default_rng(0).integers(0, 255, (channels, *size), np.uint8)
    with torch.no_grad():
        expected = model(torch.from_numpy(pixels)[None]).argmax(1)[0]
    found = example.predict.predicted(model, pixels)
    assert (torch.from_numpy(found) == expected).float().mean() > 0.999  # but for ties


def test_which_network_it_was_is_seen_from_its_weights(example: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = example.model
    for made in (model.UNet(3), model.UNet(1, 7, (8, 12)), model.OnePixel(1), model.OnePixel(3, 9)):
        save_file(made.state_dict(), tmp_path / "model.safetensors")
        found = example.model.network_of(tmp_path)
        assert type(found) is type(made)
        assert (found.channels, found.classes) == (made.channels, made.classes)
        assert not found.training
    save_file({"else": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="got other weights"):
        example.model.network_of(tmp_path)


def test_memory_measures_and_compares(
    example: Any, earth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        example.memory.measured(
            SimpleNamespace(batch_size=4, shards=[2], devices=[devices], data=earth)
        )
        for devices in ("cpu", "cpu,cpu")
    ]
    assert found[0]["digest"] == found[1]["digest"]
    assert 0 < found[0]["before"] <= found[0]["peak"]
    digests = iter("aaab")
    monkeypatch.setattr(
        example.memory, "run", lambda *_: {"before": 1, "peak": 2, "digest": next(digests)}
    )
    both = ("--shards", 1, "--devices", "cpu", "cpu,cpu")
    assert main(example.memory, monkeypatch, *both) == 0
    assert main(example.memory, monkeypatch, *both) == 1
