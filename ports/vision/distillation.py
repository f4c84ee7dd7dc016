"""Distillation: a frozen teacher beside the student, softened targets and true ones."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 20, generator=generator)
    return TensorDataset(values, torch.randint(4, (64,), generator=generator))


torch.manual_seed(3)
teacher = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).eval()
teacher.requires_grad_(False)


def distilled(logits, targets, labels, heat=3.0):
    soft = F.kl_div(
        F.log_softmax(logits / heat, 1), F.softmax(targets / heat, 1), reduction="batchmean"
    )
    return heat**2 * soft + F.cross_entropy(logits, labels)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
    for _ in range(3):
        for values, labels in loader:
            loss = distilled(model(values), teacher(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:
            loss = distilled(model(values), teacher(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        return distilled(model(values), teacher(values), labels)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
