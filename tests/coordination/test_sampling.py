"""Sampling: rows drawn by their weights, the same for ever, on any machine.

Legend: R rows of the dataset, D rows of an epoch.
"""

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import fixed
from support.messages import expect_error

from quorate.coordination.plan import Plan, from_json
from quorate.coordination.sampling import Sampling, sampling_of
from quorate.errors import SettingError

weights = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.integers(0, 9).map(float)),
    min_size=1,
    max_size=60,
).filter(any)


@given(weights, st.integers(1, 200), st.integers(0, 2**63), st.integers(0, 99))
@fixed(60)
def test_only_rows_with_a_weight_are_drawn(
    given_weights: list[float], rows: int, seed: int, epoch: int
) -> None:
    sampling = Sampling(given_weights, rows=rows)
    drawn = sampling.drawn(seed, epoch)
    assert drawn.dtype == np.int64
    assert drawn.shape == (rows,)
    assert drawn.min() >= 0
    assert all(given_weights[row] > 0 for row in drawn)
    assert np.array_equal(
        drawn, Sampling(torch.tensor(given_weights).double(), rows=rows).drawn(seed, epoch)
    )
    once = Sampling(given_weights, replacement=False)
    every = once.drawn(seed, epoch)
    assert sorted(every) == [row for row, weight in enumerate(given_weights) if weight > 0]
    few = Sampling(given_weights, replacement=False, rows=1 + len(every) // 2)
    assert np.array_equal(few.drawn(seed, epoch), every[: 1 + len(every) // 2])


@pytest.mark.parametrize("labels", [[0] * 90 + [1] * 9 + [7], ["a"] * 90 + ["b"] * 9 + ["c"]])
def test_balanced_classes_are_as_likely_as_each_other(labels: Any) -> None:
    drawn = Sampling.balanced(labels, rows=30_000).drawn(0, 0)
    counts = [(drawn < 90).sum(), ((drawn >= 90) & (drawn < 99)).sum(), (drawn == 99).sum()]
    assert all(abs(count - 10_000) < 4 * math.sqrt(30_000 * 2 / 9) for count in counts)
    tensor = torch.tensor([0] * 90 + [1] * 9 + [7])
    assert np.array_equal(Sampling.balanced(tensor, rows=30_000).drawn(0, 0), drawn)


def test_what_is_drawn_is_the_same_for_ever() -> None:
    """Kept: another order after an update of quorate would be another training."""
    base = np.arange(1000) % 17 / 3
    found = {
        f"{replacement}": hashlib.sha256(
            Sampling(base, rows=800, replacement=replacement).drawn(42, 7).astype("<i8").tobytes()
        ).hexdigest()[:16]
        for replacement in (True, False)
    }
    assert found == {"True": "7b1b6dd3286bacf4", "False": "7a05429614d586ac"}


def test_other_weights_in_a_worker_process_are_refused() -> None:
    plan = Plan(rows=4, batch_size=2, shards=1, sampling=Sampling([1, 1, 1, 2]))
    for other in (None, Sampling([1, 1, 1, 3]), Sampling([1, 1, 1, 2], rows=5)):
        with expect_error(SettingError, name="sampling"):
            from_json(plan.to_json(), None, other)
    # An evaluation has no sampling, even if the script has a sampling.
    plain = Plan(rows=4, batch_size=2, shards=1, shuffle=False)
    assert from_json(plain.to_json(), None, Sampling([1, 1, 1, 2])).sampling is None


@pytest.mark.parametrize(
    "made",
    [
        lambda: Sampling([1, -1]),
        lambda: Sampling([1, math.nan]),
        lambda: Sampling([0, 0]),
        lambda: Sampling([1e308, 1e308]),
        lambda: Sampling([]),
        lambda: Sampling([[1, 2]]),
        lambda: Sampling(["a"]),
        lambda: Sampling([1, 2], rows=0),
        lambda: Sampling([1, 0], rows=2, replacement=False),
        lambda: Sampling.balanced([[1], [2]]),
        lambda: Sampling.balanced([]),
        lambda: Sampling([1, 2]).require_rows(3),
        lambda: sampling_of("sampling", "balanced"),
        lambda: sampling_of("sampling", 3),
    ],
)
def test_wrong_weights_are_named(made: Any) -> None:
    with expect_error(SettingError):
        made()
