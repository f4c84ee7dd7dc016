"""The mean gradient in one pass: the bits of whole vectors, on any number of cores."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.coordination.tree import tree_sum
from quorate.replica.flat import Flat, Layout
from quorate.training.optimizing.cores import side_by_side
from quorate.training.optimizing.mean import SPAN, Addition, make_mean, squares
from quorate.training.optimizing.not_finite import are_finite

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def random(dtypes: list[torch.dtype], sizes: list[int], seed: int) -> Flat:
    """Vectors of these dtypes, of which those of sections are multiples of 64 bytes."""
    layout = Layout(
        (str(n), torch.empty(size, dtype=dtype))
        for n, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True))
    )
    flat = layout.new(torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for view in flat.views.values():
        view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
    return flat


def copied(flat: Flat) -> Flat:
    copy = flat.new()
    copy.copy_(flat)
    return copy


@settings(max_examples=40, deadline=None)
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2, unique=True),
    size=st.builds(
        lambda spans, beside: max(1, spans * SPAN + beside),
        st.integers(0, 3),
        st.integers(-70, 70),
    ),
    shards=st.integers(1, 5),
    weight=st.sampled_from((1.0, 3.0, 256.0, 0.1)),
    cores=st.integers(1, 4),
)
def test_a_mean_in_blocks_has_the_bits_of_one_in_whole_vectors(
    dtypes: list[torch.dtype], size: int, shards: int, weight: float, cores: int
) -> None:
    parts = [((0, n), random(dtypes, [size, 7][: len(dtypes)], n)) for n in range(shards)]
    whole = tree_sum([(node, copied(flat)) for node, flat in parts], shards, Flat.add_)
    assert are_finite(whole)
    whole.div_(weight)

    additions: list[Addition] = []

    def join(left: Flat, right: Flat) -> Flat:
        additions.append((left, right))
        return left

    total = tree_sum(parts, shards, join)
    found = make_mean(total, additions, weight, checks=True, wants_squares=True, cores=cores)
    assert found.is_finite
    assert found.squares == [squares(vector) for vector in whole.vectors]
    for mine, expected in zip(total.vectors, whole.vectors, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, SPAN - 1, SPAN, 2 * SPAN + 5, 3 * SPAN + 4])
def test_one_element_that_is_not_finite_is_seen_wherever_it_is(
    place: int, odd: float, cores: int
) -> None:
    left, right = (random([torch.float32], [3 * SPAN + 5], seed) for seed in (1, 2))
    right.vectors[0][place] = odd
    found = make_mean(left, [(left, right)], 2.0, checks=True, wants_squares=False, cores=cores)
    assert not found.is_finite


def test_large_elements_whose_sum_overflows_are_finite() -> None:
    left = random([torch.float32], [2 * SPAN], 1)
    left.vectors[0].fill_(3e38)
    found = make_mean(left, (), 4.0, checks=True, wants_squares=False, cores=2)
    assert found.is_finite
    assert torch.equal(left.vectors[0], torch.full((2 * SPAN,), 3e38) / 4.0)


def test_tasks_side_by_side_return_in_order_and_all_have_ended_when_one_raises() -> None:
    assert side_by_side([lambda n=n: n * n for n in range(5)]) == [0, 1, 4, 9, 16]
    assert side_by_side([torch.get_num_threads] * 3) == [1, 1, 1]
    ended = threading.Event()

    def fails() -> None:
        raise ValueError("here")

    def waits() -> None:
        ended.wait(0.2)
        ended.set()

    with pytest.raises(ValueError, match="here"):
        side_by_side([waits, fails])
    with pytest.raises(ValueError, match="here"):
        side_by_side([fails, waits])
    assert ended.is_set()


@pytest.mark.parametrize("weight", [2.0**-200, 2.0**-100, 1.0, 2.0**100, 2.0**200])
@pytest.mark.parametrize("odd", [None, float("inf"), float("nan")])
def test_few_elements_are_divided_and_checked_whatever_the_weight(
    weight: float, odd: float | None
) -> None:
    gradient = random([torch.float64], [5], 0)
    (vector,) = gradient.vectors
    if odd is not None:
        vector[3] = odd
    expected = vector / weight
    found = make_mean(gradient, (), weight, checks=True, wants_squares=False, cores=1)
    assert found.is_finite is (odd is None)
    assert torch.equal(vector.nan_to_num(7.0), expected.nan_to_num(7.0))
