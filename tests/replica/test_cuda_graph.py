"""Shards as CUDA graphs: on a GPU, the same bits; the state after a failed recording."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.digests import digest_of
from support.fits import fit
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

from quorate.errors import UserError
from quorate.replica.cuda_graph import Replay, ShardGraphs, Step, captured
from quorate.replica.notes import Notes


class CpuRecord:
    """A recording on the CPU, always failing; torch can end the recording, or cannot."""

    device = torch.device("cpu")

    def __init__(self, *, can_end: bool) -> None:
        self.can_end, self.is_under_way = can_end, False

    def warm_up(self, step: Callable[[], Step]) -> tuple[Step, str | None]:
        return step(), None

    def __call__(self, step: Callable[[], Step]) -> tuple[Step, Replay]:
        return captured(self._capture(), step), lambda: None

    @contextmanager
    def _capture(self) -> Iterator[None]:
        self.is_under_way = True
        yield
        if not self.can_end:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.is_under_way = False


@pytest.mark.parametrize("can_end", [True, False])
def test_a_recording_that_fails_is_ended_or_ends_the_run(can_end: bool) -> None:
    record, notes = CpuRecord(can_end=can_end), Notes()

    def step(_: Any) -> Step:
        if record.is_under_way:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Step(torch.ones(()), {})

    def run() -> Step | None:
        graphs = ShardGraphs(record, list, notes)
        return graphs.run([torch.ones(2)], object(), lambda: None, step)

    if can_end:
        assert run() is None  # and the shard is computed without
        assert not record.is_under_way
        assert "recording failed: RuntimeError: operation not permitted" in str(notes.take()[0])
    else:
        with expect_error(UserError, name="compile=True"):
            run()


def drops() -> nn.Module:
    layers = (nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))
    return nn.Sequential(*layers)


def mean(model: nn.Module, batch: Any) -> Any:
    value = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return {"loss": value, "weight": (batch[1] >= 0).sum()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is here")
@pytest.mark.parametrize("workers", [1, 2])
def test_graphs_on_a_gpu_change_no_bit(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with graphs, and compiled without."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(44, 6, generator=generator), torch.randint(0, 3, (44,), generator=generator)
    )

    def run() -> str:
        shape = {"batch_size": 16, "shards": 3, "devices": "cuda:0", "workers": workers}
        adam = torch.optim.Adam
        return digest_of(fit(drops, mean, data, optimizer=adam, epochs=4, compile=True, **shape))

    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))
    )
    with_graphs = run()
    assert replays
    monkeypatch.setattr("quorate.replica.cuda_graph.MOST_GRAPHS", 0)
    assert run() == with_graphs
