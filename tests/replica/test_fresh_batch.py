"""A shard is computed from a fresh copy of its batch, however often; the dataset stays unchanged.

Losses that write their batch and draw, and so need repeated shards, are in ``strangers``.
"""

from collections.abc import Callable
from typing import Any

import torch
from support.digests import digest_of
from support.fits import fit
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from quorate.replica.nested import tensors
from quorate.replica.transfer import Transfers, copied, pinned

ROWS = 12
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))


def writes(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch[0]
    x.mul_(2).add_(1)
    return model(x).float().mean()


def writes_nothing(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0] * 2 + 1).float().mean()


def test_also_where_it_is_scaled_anew() -> None:
    """float16 overflows, and a shard is computed again with a smaller scale."""

    def steep(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda model, batch: loss(model, batch) * 3e4

    found = set()
    for loss in (writes, writes_nothing):
        trainer = fit(lambda: nn.Linear(4, 3), steep(loss), TensorDataset(X), precision="fp16")
        trainer.evaluate(TensorDataset(X))
        found.add(digest_of(trainer))
    assert len(found) == 1


class Whole(Dataset[dict[str, torch.Tensor]]):
    """Rows kept as tensors of the dataset: one row is one batch."""

    def __init__(self) -> None:
        self.x, self.labels = [x.clone().expand(2, 4) for x in X], [*torch.arange(ROWS)]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[row], "labels": self.labels[row].reshape(1)}


def write_all(model: nn.Module, batch: Any) -> torch.Tensor:
    for tensor in (batch["labels"], batch["x"]) if batch["x"].stride(0) else [batch["labels"]]:
        tensor.fill_(7)
    return model(batch["x"]).square().mean()


def test_what_a_loss_writes_is_not_the_dataset_nor_what_augments_it() -> None:
    data, table = Whole(), torch.ones(2, 4)
    one_row: dict[str, Any] = {"batch_size": 1, "shards": 1, "collate": lambda samples: samples[0]}
    fit(nn.Linear(4, 3), write_all, data, epochs=2, **one_row).evaluate(data)
    assert torch.stack(data.labels).tolist() == [*range(ROWS)]
    assert torch.equal(torch.stack([x[0] for x in data.x]), X)

    def augment(batch: Any, _draws: Any) -> Any:
        return {"x": table, "labels": batch[0].long()}

    fit(nn.Linear(4, 3), write_all, TensorDataset(X), batch_size=2, shards=1, augment=augment)
    assert torch.equal(table, torch.ones(2, 4))


def test_copies_have_the_strides_of_what_they_are_copies_of() -> None:
    big = torch.arange(60.0).reshape(6, 10)
    for tensor in (
        big,
        big.T,
        big[:, ::2],
        big[1:3].expand(2, 10),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(0, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
    ):
        made = copied(tensor)
        assert torch.equal(made, tensor)
        assert made.stride() == tensor.stride()
        assert made.numel() == 0 or made.data_ptr() != tensor.data_ptr()
    narrow = torch.zeros(50, 1000)[:, :5]
    assert copied(narrow).untyped_storage().nbytes() == 50 * 5 * 4  # not of the whole matrix


def test_on_a_cpu_a_batch_stays_where_it_is() -> None:
    cpu, batch = torch.device("cpu"), [(torch.ones(2), {"a": torch.zeros(1)}), "text"]
    assert pinned(batch, cpu) is batch
    transfers = Transfers(cpu)
    transfers.begin(batch)
    taken = transfers.take(batch)
    assert all(a is b for a, b in zip(tensors(taken), tensors(batch), strict=True))
