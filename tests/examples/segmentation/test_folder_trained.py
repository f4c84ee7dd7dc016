"""A folder of pictures in a training: options, drawing, exporting, and what batches lacked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.example_modules import EXAMPLES, main
from support.picture_folder import COLOURS, write

import quorate
from quorate.errors import DataError, SettingError, UserError

FOLDER = EXAMPLES / "segmentation"


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
