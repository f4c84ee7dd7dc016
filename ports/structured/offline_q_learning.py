"""Offline Q-learning: a replay buffer as dataset, a target network updated now and then."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def replay() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(128, 4, generator=generator)
    actions = torch.randint(2, (128,), generator=generator)
    after = states + 0.1 * torch.randn(128, 4, generator=generator)
    return TensorDataset(states, actions, states.sum(1) * (2 * actions - 1), after)


class DoubleQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target = copy.deepcopy(self.q).requires_grad_(False)

    def follow(self) -> None:
        self.target.load_state_dict(self.q.state_dict())


def bellman(model, states, actions, rewards, after):
    values = model.q(states).gather(1, actions[:, None]).squeeze(1)
    best = model.q(after).argmax(1, keepdim=True)
    return F.smooth_l1_loss(values, rewards + 0.9 * model.target(after).gather(1, best).squeeze(1))


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = DoubleQ()
    optimizer = torch.optim.SGD(model.q.parameters(), lr=0.05)
    loader = DataLoader(replay(), batch_size=32)
    step = 0
    for _ in range(3):
        for batch in loader:
            loss = bellman(model, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 3 == 0:
                model.follow()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = DoubleQ()
    optimizer = torch.optim.SGD(model.q.parameters(), lr=0.05)
    loader = DataLoader(replay(), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    for _ in range(3):
        for batch in loader:
            loss = bellman(model, *batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % 3 == 0:
                model.follow()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    class Follow(quorate.Callback):
        def started(self, trainer):
            self.model = trainer.model

        def updated(self, report):
            if report.global_step % 3 == 0:
                self.model.follow()

    torch.manual_seed(0)
    model = DoubleQ()
    trainer = quorate.Trainer(
        model,
        lambda model, batch: bellman(model, *batch),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=32,
        shards=2,
    )
    trainer.fit(replay(), epochs=3, shuffle=False, callbacks=[Follow()])
    return trainer.model


if __name__ == "__main__":
    ported()
