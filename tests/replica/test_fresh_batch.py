"""A shard is computed from a fresh copy of its batch, however often; the dataset stays as it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.front_door import trainer
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from quorate.replica.digest import digest
from quorate.replica.transfer import FreshBatch, Transfers, WrittenError, copied

ROWS = 12
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 3 - 1  # -1: not counted


class Rows(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": X[row], "labels": Y[row], "name": str(row)}


class Net(nn.Module):
    """May draw from Python's random, which is noticed when a shard was computed."""

    def __init__(self, draws_from: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3)
        self.calls, self.draws_from = 0, draws_from

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.draws_from is not None and self.calls > self.draws_from:
            return self.layer(x) * (0.5 + random.random())
        return self.layer(x)


def pops(model: nn.Module, batch: Any) -> torch.Tensor:
    labels = batch.pop("labels")
    logits = model(batch.pop("x"))
    assert sorted(batch) == ["name"]
    return nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / 4


def masks(model: nn.Module, batch: Any) -> torch.Tensor:
    x, labels = batch["x"], batch["labels"]
    assert (labels == -100).sum() == 0  # as of a batch that was computed from before
    labels[labels == -1] = -100
    x.mul_(2).add_(1)
    return nn.functional.cross_entropy(model(x), labels, reduction="sum") / 4


def keeps(model: nn.Module, batch: Any) -> torch.Tensor:
    labels = batch["labels"].masked_fill(batch["labels"] == -1, -100)
    logits = model(batch["x"] * 2 + 1)
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / 4


def run(loss: Any, draws_from: int | None, workers: int, **settings: Any) -> str:
    made = trainer(
        Net(draws_from),
        loss,
        optimizer=torch.optim.Adam,
        batch_size=6,
        shards=3,
        devices="cpu",
        workers=workers,
        engine="towers",
        **settings,
    )
    made.fit(Rows(), epochs=3)
    made.evaluate(Rows())
    return digest(made.model.state_dict().items())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("draws_from", [None, 0])
def test_a_loss_may_take_its_batch_apart_and_write_it(draws_from: int | None, workers: int) -> None:
    assert run(masks, draws_from, workers) == run(keeps, draws_from, 1)
    run(pops, draws_from, workers)


@pytest.mark.parametrize("loss", [masks, pops])
def test_also_where_draws_are_noticed_late(loss: Any) -> None:
    """The batch was written when it turns out that the shard has to be computed again."""
    run(loss, 7, 1)


def test_also_where_it_is_scaled_anew() -> None:
    """float16 overflows, and a shard is computed again with a smaller scale."""

    def steep(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda model, batch: loss(model, batch) * 3e4

    found = {run(steep(loss), None, 1, precision="fp16") for loss in (masks, keeps)}
    assert len(found) == 1


def own_rows(samples: list[Any]) -> Any:
    """Collate without copying: the dataset's own tensors."""
    return samples[0]


class Whole(Dataset[dict[str, torch.Tensor]]):
    """Its rows are its own tensors: one row is one batch."""

    def __init__(self) -> None:
        self.x, self.labels = [x.clone().expand(2, 4) for x in X], [y.clone() for y in Y]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[row], "labels": self.labels[row].reshape(1)}


def write_all(model: nn.Module, batch: Any) -> torch.Tensor:
    for tensor in (batch["labels"], batch["x"]) if batch["x"].stride(0) else [batch["labels"]]:
        tensor.fill_(7)
    return model(batch["x"]).square().mean()


def test_what_a_loss_writes_is_not_the_dataset() -> None:
    data = Whole()
    made = trainer(
        Net(None),
        write_all,
        optimizer=torch.optim.SGD,
        batch_size=1,
        shards=1,
        devices="cpu",
        workers=1,
        collate=own_rows,
    )
    made.fit(data, epochs=2)
    made.evaluate(data)
    assert torch.equal(torch.stack(data.labels), Y)
    assert torch.equal(torch.stack([x[0] for x in data.x]), X)


def test_nor_where_rows_are_augmented() -> None:
    table = torch.ones(2, 4)

    def augment(batch: Any, _draws: Any) -> Any:
        return {"x": table, "labels": batch[1]}

    made = trainer(
        Net(None),
        write_all,
        optimizer=torch.optim.SGD,
        batch_size=2,
        shards=1,
        devices="cpu",
        workers=1,
        augment=augment,
    )
    made.fit(TensorDataset(X, Y), epochs=1)
    assert torch.equal(table, torch.ones(2, 4))


def test_nothing_is_copied_until_it_has_to_be() -> None:
    batch = {"x": torch.ones(3), "rest": [torch.zeros(2), "text", 3]}
    fresh = FreshBatch(batch, Transfers(torch.device("cpu")).take, keeps=False)
    first = fresh.take()
    assert first is not batch
    assert first["x"] is batch["x"]
    del first["rest"][0]
    again = fresh.take()
    assert again["rest"][0] is batch["rest"][0]
    again["x"].add_(1)
    with pytest.raises(WrittenError):
        fresh.take()


def test_copies_have_the_strides_of_what_they_are_copies_of() -> None:
    big = torch.arange(60.0).reshape(6, 10)
    for tensor in (
        big,
        big.T,
        big[:, :7],
        big[:, ::2],
        big[1:3].expand(2, 10),
        torch.ones(1, 3).expand(4, 3),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(0, 3),
        torch.tensor(2.0),
        torch.randn(3, dtype=torch.complex64).conj(),
    ):
        made = copied(tensor)
        assert torch.equal(made, tensor)
        assert made.stride() == tensor.stride()
        assert made.numel() == 0 or made.data_ptr() != tensor.data_ptr()
    narrow = torch.zeros(50, 1000)[:, :5]
    assert copied(narrow).untyped_storage().nbytes() == 50 * 5 * 4  # not of the whole matrix
