"""Molecules: energies and forces, messages by index_add, forces as gradients in the loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import quorate


class Molecules(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        places = torch.randn(5, 3, generator=generator)
        return places, places.square().sum() / 10, -places / 5


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 8))
        self.node = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, places):
        pairs = torch.combinations(torch.arange(5))
        ends, starts = torch.cat([pairs, pairs.flip(1)]).T
        distances = (places[:, ends] - places[:, starts]).square().sum(2, keepdim=True)
        messages = self.edge(distances)
        heard = torch.zeros(len(places), 5, 8).index_add(1, ends, messages)
        return self.node(heard).sum((1, 2))


def energy_and_forces(model, places, energies, forces):
    places = places.clone().requires_grad_()
    found = model(places)
    (slope,) = torch.autograd.grad(found.sum(), places, create_graph=True)
    return F.mse_loss(found, energies) + F.l1_loss(-slope, forces)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Energy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(Molecules(), batch_size=8)
    for _ in range(3):
        for batch in loader:
            loss = energy_and_forces(model, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Energy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(Molecules(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            loss = energy_and_forces(model, *batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    torch.manual_seed(0)
    model = Energy()
    trainer = quorate.Trainer(
        model,
        lambda model, batch: energy_and_forces(model, *batch),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.001),
        batch_size=8,
        shards=2,
    )
    trainer.fit(Molecules(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
