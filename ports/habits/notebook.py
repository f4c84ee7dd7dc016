"""Cells of a notebook, in one namespace without a file: workers are threads."""

from torch import nn

FIRST = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
rows = TensorDataset(torch.randn(64, 12), torch.randint(3, (64,)))
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))
"""


def plain() -> nn.Module:
    cells = [
        FIRST,
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(rows, batch_size=16)
""",
        """
for _ in range(3):
    for values, labels in loader:
        loss = F.cross_entropy(model(values), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    ]
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(cell, names)
    return names["model"]


def accelerated() -> nn.Module:
    cells = [
        FIRST,
        """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(rows, batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
""",
        """
for _ in range(3):
    for values, labels in loader:
        loss = F.cross_entropy(model(values), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
""",
    ]
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(cell, names)
    return names["model"]


def ported() -> nn.Module:
    cells = [
        FIRST,
        """
import quorate

def loss(model, batch):
    values, labels = batch
    return F.cross_entropy(model(values), labels)
""",
        """
trainer = quorate.Trainer(
    model,
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    batch_size=16,
    shards=2,
)
""",
        "trainer.fit(rows, epochs=3, shuffle=False)",
    ]
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(cell, names)
    return names["trainer"].model


if __name__ == "__main__":
    ported()
