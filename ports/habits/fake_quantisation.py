"""Quantisation-aware training: weights rounded to 8 bits, gradients straight through."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 12, generator=generator)
    return TensorDataset(values, torch.randint(3, (64,), generator=generator))


class Rounded(nn.Linear):
    def forward(self, values):
        scale = self.weight.detach().abs().max() / 127
        levels = torch.fake_quantize_per_tensor_affine(self.weight, scale.item(), 0, -127, 127)
        return F.linear(values, levels, self.bias)


def rounding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Rounded(12, 16), nn.ReLU(), Rounded(16, 3))


def plain() -> nn.Module:
    model = rounding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
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
    model = rounding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
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
        rounding(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
