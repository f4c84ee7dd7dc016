"""Neural differential equation: a spiral, solved by torchdiffeq with fixed steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdiffeq import odeint

import quorate


def starts_and_ends() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    starts = torch.randn(48, 2, generator=generator)
    turn = torch.linalg.matrix_exp(torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]))
    return TensorDataset(starts, starts @ turn.T)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, _, state):
        return self.body(state)


def ends(model, starts):
    return odeint(
        model, starts, torch.tensor([0.0, 1.0]), method="rk4", options={"step_size": 0.2}
    )[-1]


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Field()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(starts_and_ends(), batch_size=16)
    for _ in range(3):
        for starts, true in loader:
            loss = F.mse_loss(ends(model, starts), true)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Field()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(starts_and_ends(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for starts, true in loader:
            loss = F.mse_loss(ends(model, starts), true)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        starts, true = batch
        return F.mse_loss(ends(model, starts), true)

    torch.manual_seed(0)
    model = Field()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(starts_and_ends(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
