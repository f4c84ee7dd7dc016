"""The cut alone: the measured costs of stages, and the best-balanced runs of stages."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import expect_error
from torch import nn

from quorate.errors import CutError
from quorate.replica.pipeline.balance import NEARLY, ModelPieces, balanced, memory, pieces
from quorate.replica.pipeline.measure import Cost
from quorate.replica.pipeline.partition import partition


def sums(costs: list[int], begins: tuple[int, ...]) -> list[int]:
    edges = [0, *begins, len(costs)]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(0, 70),
)
def test_the_costliest_run_is_the_least_of_all_partitions_in_the_bound(
    pairs: list[tuple[int, int]], runs: int, most: int
) -> None:
    costs, sizes = [a for a, _ in pairs], [b for _, b in pairs]

    def fits(run: int, first: int, end: int) -> bool:
        return sum(sizes[first:end]) + run <= most

    every = [
        begins
        for begins in itertools.combinations(range(1, len(costs)), runs - 1)
        if runs <= len(costs)
        and all(size + run <= most for run, size in enumerate(sums(sizes, begins)))
    ]
    found = partition(costs, runs, fits)
    assert partition(costs, runs, fits) == found
    assert (found is None) == (not every)
    if found is not None:
        assert found[0] in every
        assert found[1] == min(max(sums(costs, each)) for each in every)


def test_a_model_of_equal_layers_is_cut_in_the_middle() -> None:
    piece = Cost(1.0, 2.0, 100, 100, 10, 5)
    names = tuple("bcdefgh")
    found = ModelPieces(names, (piece,) * 8)
    assert found.balanced(2) == ("e",)
    assert found.balanced(4) == ("c", "e", "g")
    assert found.balanced(9) is None
    # 8 x (100 + 3 x 100 + 10 + 5) do not fit a device of 2,000, but they fit two devices.
    assert memory(found.costs) == 8 * 415
    assert found.balanced(1, 2_000) is None
    assert found.balanced(2, 2_000) == ("e",)
    assert [len(run) for run in found.runs(("c", "g"))] == [2, 4, 2]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 900)), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_of_cuts_nearly_as_fast_the_lightest(pairs: list[tuple[int, int]], stages: int) -> None:
    costs = tuple(Cost(seconds, 0.0, nbytes, nbytes // 2, 7, 3) for seconds, nbytes in pairs)
    found = ModelPieces(tuple(f"part{n}" for n in range(1, len(pairs))), costs)

    def of(split: tuple[str, ...]) -> tuple[float, float]:
        runs = found.runs(split)
        seconds = max(sum(cost.seconds for cost in run) for run in runs)
        return seconds, max(memory(run, stages - stage) for stage, run in enumerate(runs))

    every = [of(split) for split in itertools.combinations(found.names, stages - 1)]
    split = found.lightest(stages)
    if not every or stages > len(costs):
        assert split is None
        return
    assert split is not None
    least_s = min(seconds for seconds, _ in every)
    assert of(split)[0] <= NEARLY * least_s
    assert of(split)[1] == min(size for seconds, size in every if seconds <= NEARLY * least_s)


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x.sin()
        return x


class Counts(nn.Sequential):
    """Cannot be followed."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_the_slow_part_has_a_stage_of_its_own_and_what_cannot_be_followed_is_not_cut() -> None:
    layers = (nn.Linear(64, 64), nn.Tanh(), Slow(), nn.Linear(64, 64), nn.Tanh())
    x, model = torch.randn(64, 64), nn.Sequential(*layers)
    assert pieces(model, (x,)).balanced(3) == ("2", "3")
    assert len(pieces(model, (x,)).costs) == 5
    for refused, stages in ((model, 6), (Counts(nn.Linear(64, 4), nn.Linear(4, 4)), 2)):
        with expect_error(CutError, name="split"):
            balanced(refused, stages, (x,))
