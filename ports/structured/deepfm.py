"""Click rates: DeepFM over categorical fields, binary cross-entropy."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def clicks() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    fields = torch.randint(20, (256, 5), generator=generator)
    return TensorDataset(fields, (fields.sum(1) % 3 == 0).float())


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", 20 * torch.arange(5))
        self.linear, self.factors = nn.Embedding(100, 1), nn.Embedding(100, 8)
        self.deep = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, fields):
        fields = fields + self.offsets
        factors = self.factors(fields)
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1)
        return self.linear(fields).sum((1, 2)) + pairs + self.deep(factors.flatten(1)).squeeze(1)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = DeepFM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(clicks(), batch_size=64)
    for _ in range(3):
        for fields, clicked in loader:
            loss = F.binary_cross_entropy_with_logits(model(fields), clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = DeepFM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(clicks(), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for fields, clicked in loader:
            loss = F.binary_cross_entropy_with_logits(model(fields), clicked)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        fields, clicked = batch
        return F.binary_cross_entropy_with_logits(model(fields), clicked)

    torch.manual_seed(0)
    model = DeepFM()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
        batch_size=64,
        shards=2,
    )
    trainer.fit(clicks(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
