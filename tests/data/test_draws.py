"""Augmentation: numbers that belong to a row, operations on images, the same whoever computes."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import front_door
from support.warm import WARM
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import quorate
from quorate.coordination.keys import hashes
from quorate.coordination.plan import Plan
from quorate.data import images as ops
from quorate.data.draws import Draws
from quorate.data.source import Source
from quorate.errors import DataError, SettingError
from quorate.replica.digest import digest

SCRIPT = Path(__file__).parents[1] / "scripts" / "augmented.py"


# --- the numbers ----------------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """One output in plain integers, from the paper."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_hashes_are_the_outputs_of_splitmix64() -> None:
    # Of a generator that is seeded with 0, as every implementation has them.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert hashes(0, np.arange(3, dtype=np.uint64)).tolist() == expected
    start = (1 << 64) - 12345
    found = hashes(start, np.array([0, 1, 77], dtype=np.uint64))
    gamma = 0x9E3779B97F4A7C15
    assert found.tolist() == [splitmix64(start + n * gamma) for n in (0, 1, 77)]


def test_a_row_has_its_numbers_in_any_batch() -> None:
    rows = [5, 900, 0, 17, 49_999]
    together = Draws(3, 1, rows)
    expected = [together.uniform(3), together.integers(10, 2), together.coins(0.3, 4)]
    for place, row in enumerate(rows):
        alone = Draws(3, 1, np.array([row]))
        for values, found in zip(
            expected, [alone.uniform(3), alone.integers(10, 2), alone.coins(0.3, 4)], strict=True
        ):
            assert torch.equal(found[0], values[place])
    assert [(v.dtype, tuple(v.shape)) for v in expected] == [
        (torch.float32, (5, 3)),
        (torch.int64, (5, 2)),
        (torch.bool, (5, 4)),
    ]


def test_numbers_depend_on_how_many_were_drawn_before_and_on_nothing_else() -> None:
    one, other = Draws(0, 0, torch.arange(8)), Draws(0, 0, range(8))
    assert torch.equal(one.uniform(5), torch.cat([other.uniform(2), other.uniform(3)], 1))
    one.coins(n=2)
    other.integers(7)
    other.uniform()
    assert torch.equal(one.integers(1000), other.integers(1000))


def test_seeds_epochs_and_rows_have_other_numbers() -> None:
    found = {
        tuple(Draws(seed, epoch, [row]).uniform(2)[0].tolist())
        for seed in (0, 1)
        for epoch in range(10)
        for row in range(10)
    }
    assert len(found) == 200


def chi_square(counts: np.ndarray) -> float:
    """Standardised: about normal with mean 0 and deviation 1 for even counts."""
    expected = counts.sum() / counts.size
    free = counts.size - 1
    return float((((counts - expected) ** 2).sum() / expected - free) / math.sqrt(2 * free))


def test_the_numbers_are_even_and_independent() -> None:
    """Fixed seeds, so a bound of 4 deviations is never met by chance twice in different ways."""
    rows, n = 50_000, 8
    values = Draws(0, 0, np.arange(rows)).uniform(n).double().numpy()
    assert abs(values.mean() - 0.5) < 4 * math.sqrt(1 / 12 / values.size)
    assert abs(values.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / values.size)
    for column in range(n):  # of each number over the rows, and of the numbers of a few rows
        assert abs(chi_square(np.histogram(values[:, column], 100, (0, 1))[0])) < 4
    # In pairs: a number and the next one; a row and the next one, the next but 7, and its double.
    pairs = [(values[:, i], values[:, i + 1]) for i in range(n - 1)]
    pairs += [(values[:-1, 0], values[1:, 0]), (values[:-8, 0], values[8:, 0])]
    pairs += [(values[: rows // 2, 0], values[::2, 0])]
    # The next epoch, the next seed.
    for other in (Draws(0, 1, np.arange(rows)), Draws(1, 0, np.arange(rows))):
        pairs.append((values[:, 0], other.uniform().double().numpy()[:, 0]))
    for one, two in pairs:
        assert abs(np.corrcoef(one, two)[0, 1]) < 4 / math.sqrt(len(one))
        assert abs(chi_square(np.histogram2d(one, two, 16, [(0, 1), (0, 1)])[0])) < 4
    # The sum over a row would show numbers that lean on each other.
    sums = values.sum(1)
    assert abs(sums.var() / (n / 12) - 1) < 4 * math.sqrt(2 / rows)


def test_integers_and_coins_are_even() -> None:
    draws = Draws(5, 2, np.arange(30_000))
    for high in (2, 5, 8, 100):
        counts = np.bincount(draws.integers(high)[:, 0].numpy(), minlength=high)
        assert counts.size == high
        assert abs(chi_square(counts)) < 4
    for p in (0.0, 0.1, 0.5, 1.0):
        share = draws.coins(p).double().mean().item()
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / 30_000)
    assert draws.integers(1).max() == 0
    assert (1 << 31) < int(draws.integers(1 << 32).max()) < (1 << 32)


def test_bounds_are_kept_where_floats_round() -> None:
    draws = Draws(0, 0, np.arange(200_000))
    for low, high in ((0.0, 1.0), (-63.0, 63.0), (1.0, 1.0 + 2**-22), (0.2, 1.8), (5.0, 5.0)):
        values = draws.uniform(low=low, high=high)
        assert values.min() >= np.float32(low)
        assert values.max() < np.float32(high) or low == high


@pytest.mark.parametrize(
    "wrong",
    [
        lambda d: d.uniform(0),
        lambda d: d.uniform(2.5),
        lambda d: d.uniform(low=1, high=0),
        lambda d: d.uniform(low=math.nan),
        lambda d: d.integers(0),
        lambda d: d.integers((1 << 32) + 1),
        lambda d: d.coins(1.5),
        lambda d: d.coins(math.nan),
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong: Any) -> None:
    with pytest.raises(SettingError):
        wrong(Draws(0, 0, [1, 2]))


# --- images ---------------------------------------------------------------------------------------

B, C, H, W = 13, 3, 9, 12


def pictures(kind: torch.dtype = torch.uint8, shape: tuple[int, ...] = (B, C, H, W)) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator).to(kind)


def test_crop_cuts_the_window_that_is_said() -> None:
    images, places = pictures(), Draws(0, 0, range(B)).uniform(2)
    padded = torch.zeros(B, C, H + 4, W + 4, dtype=torch.uint8)
    padded[:, :, 2:-2, 2:-2] = images
    for source, padding, found in (
        (images, 0, ops.crop(images, places, (5, 10))),
        (padded, 2, ops.crop(images, places, (5, 10), padding=2)),
    ):
        for i, (down, right) in enumerate(places.tolist()):
            top = int(down * (H + 2 * padding - 5 + 1))
            left = int(right * (W + 2 * padding - 10 + 1))
            assert torch.equal(found[i], source[i, :, top : top + 5, left : left + 10])


def test_all_places_are_reached_evenly() -> None:
    rows = 20_000
    images = torch.arange(H * W).view(1, 1, H, W).expand(rows, 1, H, W)
    found = ops.crop(images, Draws(0, 0, np.arange(rows)).uniform(2), (H - 2, W - 3))
    counts = np.bincount(found[:, 0, 0, 0].numpy(), minlength=H * W).reshape(H, W)
    assert (counts[3:].sum(), counts[:, 4:].sum()) == (0, 0)
    assert abs(chi_square(counts[:3, :4])) < 4
    edges = ops.crop(images[:2], torch.tensor([[0.0, 0.0], [1.0, 1.0]]), (2, 2))
    assert edges[:, 0, 0, 0].tolist() == [0, (H - 2) * W + W - 2]


def test_turn_makes_each_symmetry_of_a_square() -> None:
    images = pictures(shape=(8, C, H, H))
    found = ops.turn(images, torch.arange(8))
    for k in range(4):
        assert torch.equal(found[k], torch.rot90(images[k], k, (1, 2)))
        flipped = images[4 + k].flip(2)
        assert torch.equal(found[4 + k], torch.rot90(flipped, k, (1, 2)))
    same = images[:1].expand(8, -1, -1, -1)
    assert len({tuple(t.flatten().tolist()) for t in ops.turn(same, torch.arange(8))}) == 8


def test_flip_and_the_middle() -> None:
    images, coins = pictures(), Draws(0, 0, range(B)).coins()
    found = ops.flip(images, coins)
    assert 0 < coins.sum() < B
    for i, is_flipped in enumerate(coins[:, 0].tolist()):
        assert torch.equal(found[i], images[i].flip(2) if is_flipped else images[i])
    assert torch.equal(ops.center_crop(images, (5, 6)), images[:, :, 2:7, 3:9])


def test_brightness_contrast_and_standardization_are_as_their_formulas() -> None:
    images, draws = pictures(), Draws(0, 0, range(B))
    deltas, factors = draws.uniform(low=-63, high=63), draws.uniform(low=0.2, high=1.8)
    exact = images.double()
    assert torch.equal(ops.brightness(images, deltas), images + deltas.view(B, 1, 1, 1))
    means = exact.mean((2, 3), keepdim=True)
    expected = (exact - means) * factors.view(B, 1, 1, 1) + means
    found = ops.contrast(images, factors).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    found = ops.standardize(images)
    assert found.dtype == torch.float32
    values = exact.flatten(1)
    means, deviations = values.mean(1, keepdim=True), values.std(1, correction=0, keepdim=True)
    expected = (values - means) / deviations
    torch.testing.assert_close(found.double().flatten(1), expected, rtol=1e-5, atol=1e-5)
    # Of one colour; and of almost one, where the deviation counts as 1 / sqrt(C * H * W).
    flat = torch.full((1, C, H, W), 7, dtype=torch.uint8)
    assert torch.equal(ops.standardize(flat), torch.zeros(1, C, H, W))
    nearly = flat.double()
    nearly[0, 0, 0, 0] += 0.5
    expected = (nearly - nearly.mean()) * math.sqrt(C * H * W)
    torch.testing.assert_close(ops.standardize(nearly).double(), expected, rtol=1e-5, atol=1e-5)


OPERATIONS: dict[str, Any] = {
    "crop": lambda x, d: ops.crop(x, d.uniform(2), (7, 7), padding=2),
    "center_crop": lambda x, _: ops.center_crop(x, (5, 5)),
    "flip": lambda x, d: ops.flip(x, d.coins()),
    "turn": lambda x, d: ops.turn(x, d.integers(8)),
    "brightness": lambda x, d: ops.brightness(x, d.uniform(low=-63, high=63)),
    "contrast": lambda x, d: ops.contrast(x, d.uniform(low=0.2, high=1.8)),
    "standardize": lambda x, _: ops.standardize(x),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("side", [9, 75])
def test_an_image_alone_has_the_bits_it_has_in_a_batch(name: str, side: int) -> None:
    """Whatever B, its place, its neighbours, the layout, the dtype and the number of threads."""
    operation, rows = OPERATIONS[name], 17
    base = pictures(shape=(rows, C, side, side))
    for images in (base, base.float() / 3, base.to(memory_format=torch.channels_last)):
        before = images.clone()
        together = operation(images, Draws(0, 0, range(rows)))
        assert torch.equal(images, before)
        for some in ([0], [16], [12, 3], list(range(15, 4, -1))):
            found = operation(images[some], Draws(0, 0, some))
            assert torch.equal(found, together[some])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = operation(base, Draws(0, 0, range(rows)))
        torch.set_num_threads(3)
        assert torch.equal(operation(base, Draws(0, 0, range(rows))), one)
    finally:
        torch.set_num_threads(threads)


def test_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingError, match="size: got '10 x 5 pixels'"):
        ops.crop(pictures(), torch.zeros(B, 2), (10, 5))
    with pytest.raises(SettingError, match="from 1 x 1 to the 9 x 12 of the images"):
        ops.center_crop(pictures(), (5, 0))
    with pytest.raises(SettingError, match="expected squares"):
        ops.turn(pictures(), torch.zeros(B, dtype=torch.int64))


# --- in a training --------------------------------------------------------------------------------

ROWS = 48


class ByRow(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(row)]), row


NUMBERS = TensorDataset(torch.arange(float(ROWS))[:, None], torch.arange(ROWS))


def noisy(batch: list[torch.Tensor], draws: Draws) -> list[torch.Tensor]:
    x, rows = batch
    assert rows.tolist() == draws.rows.tolist()
    return [x + draws.uniform(), rows]


def seen(dataset: Any = NUMBERS, augment: Any = noisy, **options: Any) -> set[tuple[int, float]]:
    """Row and value of all that was trained on in two epochs."""
    values: set[tuple[int, float]] = set()

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        x, rows = batch
        if model.training:
            values.update(zip(rows.tolist(), x[:, 0].tolist(), strict=True))
        else:
            assert torch.equal(x[:, 0], rows.float())
        return model(x).mean()

    trainer = front_door.trainer(
        nn.Linear(1, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
        devices="cpu",
        loading=quorate.Loading(augment=augment),
        **{"batch_size": 16, "shards": 4, "workers": 2} | options,
    )
    trainer.evaluate(dataset)
    for report in trainer.updates(dataset, epochs=2):
        if report.ends_epoch:
            trainer.evaluate(dataset)  # on the same workers
    return values


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (NUMBERS, {"workers": 1}),
        (NUMBERS, {"batch_size": 20, "shards": 3, "workers": 3}),
        (ByRow(), {}),
        (NUMBERS, {"loader_workers": 1}),
        (ByRow(), {"batch_size": 7, "shards": 2, "loader_workers": 2}),
        (NUMBERS, {"update": "bounded:2"}),
    ],
)
def test_a_row_has_one_augmentation_per_epoch_whoever_computes(
    dataset: Any, options: dict[str, Any]
) -> None:
    expected = {
        (row, row + float(Draws(0, epoch, [row]).uniform()))
        for row in range(ROWS)
        for epoch in (0, 1)
    }
    assert len(expected) == 2 * ROWS
    assert {(row, round(x, 4)) for row, x in seen(dataset, **options)} == {
        (row, round(x, 4)) for row, x in expected
    }


def test_generators_that_are_not_the_draws_are_the_shards() -> None:
    """Not of the row: but who computes does not matter."""

    def careless(batch: list[torch.Tensor], _draws: Draws) -> list[torch.Tensor]:
        x, rows = batch
        noise = torch.rand(len(x), 1) + np.random.rand() + random.random()
        return [x + noise, rows]

    found = [seen(augment=careless, workers=w, loader_workers=w // 3) for w in (1, 2, 3)]
    assert len(found[0]) == 2 * ROWS
    assert found[0] == found[1] == found[2]


def test_the_digest_is_one_on_any_number_of_towers_and_after_a_resume(tmp_path: Path) -> None:
    images = pictures(shape=(ROWS, C, 12, 12))
    labels = torch.arange(ROWS) % 10

    def distort(batch: list[torch.Tensor], draws: Draws) -> list[torch.Tensor]:
        x, labels = batch
        x = ops.flip(ops.crop(x, draws.uniform(2), (8, 8)), draws.coins())
        return [ops.standardize(ops.contrast(x, draws.uniform(low=0.5, high=2))), labels]

    def train(workers: int, dataset: Any, steps: int, run_dir: Path | None = None) -> str:
        trainer = quorate.Trainer(
            lambda: nn.Sequential(nn.Conv2d(C, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)),
            lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=torch.optim.Adam,
            batch_size=16,
            shards=4,
            devices="cpu",
            workers=workers,
            loading=quorate.Loading(augment=distort),
            run_dir=run_dir,
        )
        for _ in trainer.updates(dataset, steps=steps):
            pass
        if run_dir is not None:
            trainer.save()
        return digest(trainer.model.state_dict().items())

    whole = TensorDataset(images, labels)
    rows = [whole[i] for i in range(ROWS)]  # loaded one by one, and collated
    train(2, whole, 4, tmp_path)  # the rest, from the second epoch on, by another trainer
    found = {
        train(1, whole, 6),
        train(3, whole, 6),
        train(2, rows, 6),
        train(1, whole, 6, tmp_path),
    }
    assert len(found) == 1


def test_a_resume_without_augmentation_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(steps: int, **options: Any) -> str:
        trainer = front_door.trainer(
            nn.Linear(1, 1), lambda model, batch: model(batch[0]).mean(), optimizer=torch.optim.SGD,
            batch_size=16, shards=2, devices="cpu", workers=1, run_dir=tmp_path, **options,
        )  # fmt: skip
        trainer.fit(NUMBERS, steps=steps)
        return capsys.readouterr().out

    train(1, augment=noisy)
    assert "same bits: no" not in train(2, augment=noisy)
    assert "same bits: no, because is_augmented was True and is False since step 2" in train(3)


def test_what_is_no_augmentation_is_refused() -> None:
    source = Source(NUMBERS, Plan(rows=ROWS, batch_size=8, shards=2), None, lambda *_: None)
    with pytest.raises(DataError, match="what augment returned: got None, expected the batch"):
        source.load((0, 0))
    with pytest.raises(SettingError, match="augment: got 'int', expected a function"):
        seen(augment=3)


def test_what_it_raises_reaches_the_caller_with_the_rows() -> None:
    def broken(batch: list[torch.Tensor], draws: Draws) -> list[torch.Tensor]:
        if 17 in draws.rows:
            raise RuntimeError("no such colour")
        return batch

    with pytest.raises(RuntimeError, match="no such colour") as caught:
        seen(augment=broken)
    assert "rows [" in "".join(caught.value.__notes__)


@pytest.mark.slow
def test_worker_processes_augment_alike_and_are_compared(tmp_path: Path) -> None:
    def run(name: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        where = ("--run-dir", str(tmp_path / name))
        words = ["run", "--devices", "cpu", *where, *options, str(SCRIPT), *arguments]
        code, out, err = WARM.run(words, os.environ, 120)
        return code, out + err

    digests = set()
    for name, options, arguments in (
        ("tower", ("--engine", "towers", "--workers", "1"), ()),
        ("two", ("--engine", "processes", "--workers", "2"), ("--loader-workers", "1")),
    ):
        code, said = run(name, *options, arguments=arguments)
        assert code == 0, said
        code, shown, _ = WARM.run(["inspect", "--json", str(tmp_path / name)], os.environ, 60)
        digests.add(json.loads(shown)["digest"])
    assert len(digests) == 1
    # A worker that augments in another way is found before the first update.
    code, said = run("other", "--engine", "processes", "--workers", "2", arguments=("--other",))
    assert code == 2, said
    assert "a worker that ran the script again has another dataset" in said
