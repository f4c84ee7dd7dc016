"""Draws: the numbers of an augmentation, each bound to a row."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from quorate.coordination.keys import hashes
from quorate.data.draws import Draws
from quorate.errors import SettingError
from quorate.replica.shared import generators


def splitmix64(state: int) -> int:
    """Return an output in plain integers, from the paper."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_hashes_are_the_outputs_of_splitmix64() -> None:
    # Outputs of a generator seeded with 0, as in every implementation.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert hashes(0, np.arange(3, dtype=np.uint64)).tolist() == expected
    start = (1 << 64) - 12345
    found = hashes(start, np.array([0, 1, 77], dtype=np.uint64))
    gamma = 0x9E3779B97F4A7C15
    assert found.tolist() == [splitmix64(start + n * gamma) for n in (0, 1, 77)]


def test_numbers_depend_on_the_row_and_how_many_were_drawn_before_and_on_nothing_else() -> None:
    def drawn(rows: Any) -> list[torch.Tensor]:
        draws = Draws(3, 1, rows)
        return [draws.uniform(3), draws.integers(10, 2), draws.coins(0.3, 4)]

    rows = [5, 900, 0, 17, 49_999]
    expected = drawn(rows)
    kinds = [(torch.float32, (5, 3)), (torch.int64, (5, 2)), (torch.bool, (5, 4))]
    assert [(v.dtype, tuple(v.shape)) for v in expected] == kinds
    for place, row in enumerate(rows):  # in any batch
        for values, found in zip(expected, drawn(np.array([row])), strict=True):
            assert torch.equal(found[0], values[place])
    one, other = Draws(0, 0, torch.arange(8)), Draws(0, 0, range(8))
    assert torch.equal(one.uniform(5), torch.cat([other.uniform(2), other.uniform(3)], 1))
    one.coins(n=2)
    other.integers(7)
    other.uniform()
    assert torch.equal(one.integers(1000), other.integers(1000))
    of_each = {
        tuple(Draws(seed, epoch, [row]).uniform(2)[0].tolist())
        for seed in (0, 1)
        for epoch in range(10)
        for row in range(10)
    }
    assert len(of_each) == 200


def test_integers_and_coins_are_even() -> None:
    draws = Draws(5, 2, np.arange(30_000))
    for high in (2, 5, 8, 100):
        counts = np.bincount(draws.integers(high)[:, 0].numpy(), minlength=high)
        assert counts.size == high
        expected = counts.mean()
        assert (abs(counts - expected) < 4.5 * math.sqrt(expected)).all()
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


def test_the_half_of_a_pair_of_normal_numbers_counts_after_a_restore() -> None:
    """NumPy keeps the second number of a pair without a further draw: no position tells."""
    with generators.kept():
        np.random.seed(0)
        np.random.normal()
        with_half, mark = generators.states(), generators.mark()
        np.random.normal()
        assert generators.mark() != mark
        generators.restore(with_half)
        assert generators.mark() == mark
