"""A focal loss written by hand, AdamW with AMSGrad."""

import torch
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


def focal(logits, labels, gamma=2.0):
    chances = logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    return -((1 - chances.exp()) ** gamma * chances).mean()


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    loader = DataLoader(rows(), batch_size=16)
    for _ in range(3):
        for values, labels in loader:
            loss = focal(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    loader = DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:
            loss = focal(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        return focal(model(values), labels)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
