"""A stream: an IterableDataset of webdataset, whose rows have no numbers.

Refused: a row is asked for by its number. A map-style dataset over an index of the files has them.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import webdataset as wds
from torch import nn
from torch.utils.data import DataLoader

import quorate


def shards() -> wds.WebDataset:
    folder = Path(tempfile.mkdtemp())
    with wds.TarWriter(str(folder / "rows.tar")) as writer:
        for row in range(32):
            generator = torch.Generator().manual_seed(row)
            values = torch.randn(12, generator=generator).numpy()
            writer.write({"__key__": str(row), "values.npy": values, "label.cls": row % 3})
    rows = wds.WebDataset(str(folder / "rows.tar"), shardshuffle=False)
    return rows.decode().to_tuple("values.npy", "label.cls")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(shards(), batch_size=16)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(shards(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(shards(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
