"""A learning rate per layer, and no weight decay on biases: groups of parameters."""

import torch
import torch.nn.functional as F
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


def groups(named):
    """Return a group per parameter: deeper layers learn more slowly, biases do not decay."""
    return [
        {
            "params": [parameter],
            "lr": 0.05 * 0.5 ** (name.startswith("0.")),
            "weight_decay": 0.0 if name.endswith("bias") else 1e-2,
        }
        for name, parameter in named
    ]


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(groups(model.named_parameters()), momentum=0.9)
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
    model = network()
    optimizer = torch.optim.SGD(groups(model.named_parameters()), momentum=0.9)
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

    model = network()
    names = [name for name, _ in model.named_parameters()]
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(
            groups(zip(names, params, strict=True)), momentum=0.9
        ),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
