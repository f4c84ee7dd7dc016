"""A stream: tar files in webdataset's layout, read from the beginning or by number."""

import io
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import webdataset as wds
from torch import nn
from torch.utils.data import DataLoader

import quorate
from quorate.data.streams import TarDataset


def written() -> str:
    path = str(Path(tempfile.mkdtemp()) / "rows.tar")
    with wds.TarWriter(path) as writer:
        for row in range(32):
            generator = torch.Generator().manual_seed(row)
            values = torch.randn(12, generator=generator).numpy()
            writer.write({"__key__": str(row), "values.npy": values, "label.cls": row % 3})
    return path


def shards() -> wds.WebDataset:
    rows = wds.WebDataset(written(), shardshuffle=False)
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
    def decoded(members):
        values = torch.from_numpy(np.load(io.BytesIO(members["values.npy"])))
        return values, int(members["label.cls"])

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
    trainer.fit(TarDataset(written(), decoded), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
