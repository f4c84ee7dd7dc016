"""A metric of torchmetrics that is not a mean: macro F1 of a validation set, from summed counts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassF1Score
from torchmetrics.functional.classification import multiclass_confusion_matrix

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 12, generator=generator)
    return TensorDataset(values, torch.randint(3, (64,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
    f1 = MulticlassF1Score(3)
    for _ in range(3):
        model.train()
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        f1.reset()
        with torch.no_grad():
            for values, labels in loader:
                f1.update(model(values), labels)
        print(f"F1 {f1.compute().item():.4f}")
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    f1 = MulticlassF1Score(3)
    for _ in range(3):
        model.train()
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        f1.reset()
        with torch.no_grad():
            for values, labels in loader:
                f1.update(model(values), labels)
        accelerator.print(f"F1 {f1.compute().item():.4f}")
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        logits = model(values)
        found = {"loss": F.cross_entropy(logits, labels)}
        if not model.training:
            found["confusion"] = multiclass_confusion_matrix(logits, labels, 3)
        return found

    def f1(confusion):
        hit = confusion.diagonal()
        return {"f1": (2 * hit / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)).mean()}

    trainer = quorate.Trainer(
        network(),
        loss,
        totals={"confusion": f1},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, validation=rows(), shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
