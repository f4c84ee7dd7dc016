"""Shards as CUDA graphs: when there is one, what it reads and writes; on a GPU, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.cuda_graph import (
    MOST_GRAPHS,
    ShardGraphs,
    Step,
    detached,
    forward_backward,
    unfit,
)
from quorate.replica.digest import digest
from quorate.replica.nested import mapped, tensors
from quorate.replica.notes import Notes

CPU = torch.device("cpu")


class CpuRecord:
    """What a GPU's graph does, on the CPU: a replay computes anew, from and to the same memory."""

    device = CPU

    def __init__(self) -> None:
        self.records = self.replays = 0

    def warm_up(self, step: Callable[[], Step]) -> tuple[Step, str | None]:
        return step(), None

    def __call__(self, step: Callable[[], Step]) -> tuple[Step, Callable[[], None]]:
        self.records += 1
        made = step()

        def replay() -> None:
            self.replays += 1
            found = step()
            for mine, theirs in zip(_values(made), _values(found), strict=True):
                mine.copy_(theirs)

        return made, replay


def _values(step: Step) -> list[torch.Tensor]:
    returned = step.returned if isinstance(step.returned, dict) else {"loss": step.returned}
    found = [value for value in returned.values() if isinstance(value, torch.Tensor)]
    return found + list(step.grads.values())


class Bench:
    """A linear model with a buffer that counts, and its graphs."""

    def __init__(self, loss: Callable[[nn.Module, Any], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.record, self.notes = CpuRecord(), Notes()
        self.graphs = ShardGraphs(self.record, lambda: [*self.model.buffers()], self.notes)
        self.loss = loss
        self.flat = object()

    def run(self, batch: Any) -> Step | None:
        return self.graphs.run(batch, self.flat, self.begin, self.step)

    def begin(self) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()

    def step(self, batch: Any) -> Step:
        return forward_backward(self.loss(self.model, batch), self.take)

    def take(self) -> dict[str, torch.Tensor]:
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found

    def why(self) -> str:
        (line,) = self.notes.take()
        assert str(line).startswith("shards are computed without a CUDA graph: ")
        return str(line).partition(": ")[2]


def square(model: nn.Module, batch: Any) -> Any:
    return {"loss": model(batch[0]).pow(3).mean(), "weight": batch[0].abs().sum().detach()}


def rows(seed: int, count: int = 4) -> list[torch.Tensor]:
    return [torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))]


def test_a_graph_computes_each_shard_from_its_own_batch_and_buffers() -> None:
    bench, plain = Bench(square), Bench(square)
    for seed in (1, 2, 3):
        found = bench.run(rows(seed))
        plain.begin()
        expected = plain.step(rows(seed))
        assert found is not None
        assert found.returned["weight"] == expected.returned["weight"]
        assert torch.equal(found.returned["loss"], expected.returned["loss"])
        assert found.grads.keys() == expected.grads.keys()
        for name, grad in expected.grads.items():
            assert torch.equal(found.grads[name], grad), (seed, name)
        assert bench.model[1].num_batches_tracked == 1
        assert torch.equal(bench.model[1].running_mean, plain.model[1].running_mean)
    assert (bench.record.records, bench.record.replays) == (1, 3)
    assert bench.notes.take() == []


def test_other_shapes_and_other_parameters_have_graphs_of_their_own() -> None:
    bench = Bench(square)
    bench.run(rows(1))
    bench.run(rows(1, count=5))
    assert bench.record.records == 2
    bench.flat = object()
    bench.run(rows(1))
    assert bench.record.records == 3


def test_so_many_shapes_have_graphs_and_no_more() -> None:
    bench = Bench(square)
    found = [bench.run(rows(1, count)) for count in range(2, MOST_GRAPHS + 4)]
    assert [step is None for step in found] == [False] * MOST_GRAPHS + [True] * 2
    assert bench.why().startswith(f"shards have more than {MOST_GRAPHS} shapes")
    assert bench.run(rows(1, 2)) is not None


def test_what_a_graph_would_freeze_is_computed_without_one() -> None:
    calls = iter(range(100))

    def counts(model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[0]).mean(), "call": next(calls)}

    def waits(model: nn.Module, batch: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    def rebinds(model: nn.Module, batch: Any) -> Any:
        model[1].running_mean = model[1].running_mean * 0.5
        return model(batch[0]).mean()

    for loss, reason in (
        (counts, "the loss function returns Python numbers that change"),
        (waits, "recording failed: RuntimeError: operation not permitted when stream is"),
        (rebinds, "the model replaces its buffers with new tensors"),
    ):
        bench = Bench(loss)
        assert bench.run(rows(1)) is None
        assert bench.run(rows(2)) is None
        assert bench.why().startswith(reason)
        assert bench.record.replays == 0


def test_which_batches_a_graph_can_read() -> None:
    tensor, away = torch.ones(2), torch.ones(2, device="meta")
    assert unfit([tensor, {"a": (tensor, tensor)}], CPU) is None
    assert unfit([tensor, {"a": away}], CPU) == "a tensor of the batch is on meta"
    assert unfit([tensor, 3], CPU) == "the batch contains a int, expected only tensors"
    assert unfit(["text"], CPU) == "the batch contains a str, expected only tensors"


class Pair(NamedTuple):
    image: torch.Tensor
    rest: dict[str, torch.Tensor]


def test_a_batch_is_copied_with_its_structure_and_strides() -> None:
    batch = (Pair(torch.ones(2, 3).T, {"a": torch.zeros(1)}), [torch.ones(1)])
    made = mapped(batch, torch.clone)
    assert type(made[0]) is Pair
    assert made[0].image.stride() == batch[0].image.stride()
    pairs = list(zip(tensors(made), tensors(batch), strict=True))
    assert len(pairs) == 3
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_what_a_graph_returns_keeps_no_autograd_graph() -> None:
    loss = nn.Linear(2, 1)(torch.ones(3, 2)).mean()
    assert detached(loss).grad_fn is None
    made = detached({"loss": loss, "rows": 3})
    assert made["loss"].grad_fn is None
    assert made["rows"] == 3


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


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
        trainer = quorate.Trainer(
            Drops,
            mean,
            optimizer=torch.optim.Adam,
            batch_size=16,
            shards=3,
            devices="cuda:0",
            workers=workers,
            compute=quorate.Compute(compile=True),
        )
        for _ in trainer.updates(data, epochs=4):
            pass
        return digest(trainer.model.state_dict().items())

    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))
    )
    with_graphs = run()
    assert replays
    monkeypatch.setattr("quorate.replica.cuda_graph.MOST_GRAPHS", 0)
    assert run() == with_graphs
