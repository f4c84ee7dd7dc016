"""Multi-task learning: two heads, losses weighed by learned uncertainties."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 12, generator=generator)
    return TensorDataset(values, values.sum(1), (values[:, 0] > 0).long())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.GELU())
        self.amount, self.kind = nn.Linear(16, 1), nn.Linear(16, 2)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, values):
        found = self.body(values)
        return self.amount(found).squeeze(1), self.kind(found)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
    for _ in range(3):
        for values, amounts, kinds in loader:
            amount, kind = model(values)
            losses = torch.stack([F.mse_loss(amount, amounts), F.cross_entropy(kind, kinds)])
            loss = (losses * (-model.log_variances).exp() + model.log_variances).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, amounts, kinds in loader:
            amount, kind = model(values)
            losses = torch.stack([F.mse_loss(amount, amounts), F.cross_entropy(kind, kinds)])
            loss = (losses * (-model.log_variances).exp() + model.log_variances).sum()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, amounts, kinds = batch
        amount, kind = model(values)
        losses = torch.stack([F.mse_loss(amount, amounts), F.cross_entropy(kind, kinds)])
        return {
            "loss": (losses * (-model.log_variances).exp() + model.log_variances).sum(),
            "amount": losses[0],
            "kind": losses[1],
        }

    torch.manual_seed(0)
    model = TwoHeads()
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
