"""Time series: a transformer over windows, quantiles by the pinball loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import quorate

SERIES = torch.sin(torch.arange(300) / 9) + 0.1 * torch.sin(torch.arange(300) * 1.7)
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


class Windows(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int):
        return SERIES[row : row + 24, None], SERIES[row + 24 : row + 28]


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 16)
        self.places = nn.Parameter(torch.zeros(24, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 12)

    def forward(self, past):
        return self.head(self.body(self.enter(past) + self.places)[:, -1]).unflatten(1, (4, 3))


def pinball(found, true):
    missed = true[..., None] - found
    return torch.maximum(QUANTILES * missed, (QUANTILES - 1) * missed).mean()


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(Windows(), batch_size=16)
    for _ in range(3):
        for past, future in loader:
            loss = pinball(model(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(Windows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for past, future in loader:
            loss = pinball(model(past), future)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        past, future = batch
        return pinball(model(past), future)

    torch.manual_seed(0)
    model = Forecaster()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
        batch_size=16,
        shards=2,
    )
    trainer.fit(Windows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
