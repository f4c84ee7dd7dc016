"""Draws: the numbers of an augmentation, which belong to a row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.chi_square import chi_square

from quorate.coordination.keys import hashes
from quorate.data.draws import Draws
from quorate.errors import SettingError


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
