"""Domain-adversarial training with a reversed gradient: two players, one optimizer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 10, generator=generator)
    labels = torch.randint(3, (64,), generator=generator)
    return TensorDataset(values, labels, torch.arange(64) % 2)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_, values):
        return values.view_as(values)

    @staticmethod
    def backward(_, gradient):
        return -0.3 * gradient


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
        self.label, self.domain = nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, values):
        found = self.body(values)
        return self.label(found), self.domain(Reversed.apply(found))


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Adversarial()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(rows(), batch_size=16)
    for _ in range(3):
        for values, labels, domains in loader:
            label_logits, domain_logits = model(values)
            loss = F.cross_entropy(label_logits, labels) + F.cross_entropy(domain_logits, domains)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Adversarial()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels, domains in loader:
            label_logits, domain_logits = model(values)
            loss = F.cross_entropy(label_logits, labels) + F.cross_entropy(domain_logits, domains)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels, domains = batch
        label_logits, domain_logits = model(values)
        return F.cross_entropy(label_logits, labels) + F.cross_entropy(domain_logits, domains)

    torch.manual_seed(0)
    model = Adversarial()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
