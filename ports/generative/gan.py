"""GAN: two optimizers in turn, each with its own loss.

Not compared: a plain loop draws different noise.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 2, generator=generator))


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    return nn.ModuleDict({"maker": maker, "judge": judge})


def plain() -> nn.Module:
    model = networks()
    maker, judge = model.values()
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
    loader = DataLoader(points(), batch_size=16)
    for _ in range(3):
        for (true,) in loader:
            made = maker(torch.randn(len(true), 4))
            loss = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(true)).mean()
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()
            loss = F.softplus(-judge(made)).mean()
            of_maker.zero_grad()
            loss.backward()
            of_maker.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = networks()
    maker, judge = model.values()
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
    loader = DataLoader(points(), batch_size=16)
    maker, judge, of_maker, of_judge, loader = accelerator.prepare(
        maker, judge, of_maker, of_judge, loader
    )
    for _ in range(3):
        for (true,) in loader:
            made = maker(torch.randn(len(true), 4))
            loss = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(true)).mean()
            of_judge.zero_grad()
            accelerator.backward(loss)
            of_judge.step()
            loss = F.softplus(-judge(made)).mean()
            of_maker.zero_grad()
            accelerator.backward(loss)
            of_maker.step()
    return model  # its parts are what prepare was given


def ported() -> nn.Module:
    def judged(model, batch):
        (true,) = batch
        made = model["maker"](torch.randn(len(true), 4))
        return F.softplus(model["judge"](made)).mean() + F.softplus(-model["judge"](true)).mean()

    def fooled(model, batch):
        made = model["maker"](torch.randn(len(batch[0]), 4))
        return F.softplus(-model["judge"](made)).mean()

    trainer = quorate.Trainer(
        networks(),
        {"judge": judged, "maker": fooled},
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        batch_size=16,
        shards=2,
    )
    trainer.fit(points(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
