"""A dataset of the datasets package, in its torch format, rows as dicts."""

import datasets
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 12, generator=generator)
    return TensorDataset(values, torch.randint(3, (64,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def frame() -> datasets.Dataset:
    values, labels = (tensor.tolist() for tensor in rows().tensors)
    return datasets.Dataset.from_dict({"values": values, "labels": labels}).with_format("torch")


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(frame(), batch_size=16)
    for _ in range(3):
        for batch in loader:
            loss = F.cross_entropy(model(batch["values"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(frame(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            loss = F.cross_entropy(model(batch["values"]), batch["labels"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    trainer = quorate.Trainer(
        network(),
        lambda model, batch: F.cross_entropy(model(batch["values"]), batch["labels"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(frame(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
