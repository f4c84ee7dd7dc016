"""Early stopping on a validation set, by a custom callback."""

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


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(rows(), batch_size=16)
    test_loader = DataLoader(rows(), batch_size=64)
    best, waited = float("inf"), 0
    for _ in range(10):
        model.train()
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = sum(F.cross_entropy(model(values), labels) for values, labels in test_loader)
        waited = 0 if found < best - 0.05 else waited + 1
        best = min(best, found)
        if waited == 2:
            break
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(rows(), batch_size=16)
    test_loader = DataLoader(rows(), batch_size=64)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    best, waited = float("inf"), 0
    for _ in range(10):
        model.train()
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = sum(F.cross_entropy(model(values), labels) for values, labels in test_loader)
        waited = 0 if found < best - 0.05 else waited + 1
        best = min(best, found)
        if waited == 2:
            break
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    class EarlyStopping(quorate.Callback):
        best, waited = float("inf"), 0

        def started(self, trainer):
            self.trainer = trainer

        def evaluated(self, global_step, metrics):  # noqa: ARG002
            self.waited = 0 if metrics["loss"] < self.best - 0.05 else self.waited + 1
            self.best = min(self.best, metrics["loss"])
            if self.waited == 2:
                self.trainer.stop("the validation loss does not fall")

    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=10, validation=rows(), shuffle=False, callbacks=[EarlyStopping()])
    return trainer.model


if __name__ == "__main__":
    ported()
