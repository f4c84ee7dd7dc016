"""A recurrent network whose state is carried from batch to batch (truncated backpropagation).

The state becomes a buffer, with shards=1: the state belongs to all rows of a batch, in order.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def streams() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(20, (64, 9), generator=generator))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.gru = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 20)
        self.state = None

    def forward(self, words):
        found, state = self.gru(self.words(words), self.state)
        self.state = state.detach()
        return self.head(found)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(streams(), batch_size=16)
    for _ in range(3):
        model.state = None
        for (words,) in loader:
            logits = model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(streams(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        model.state = None
        for (words,) in loader:
            logits = model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    class Buffered(Reader):
        def __init__(self) -> None:
            super().__init__()
            del self.state
            self.register_buffer("state", torch.zeros(1, 16, 16))

    class Reset(quorate.Callback):
        def started(self, trainer):
            self.model = trainer.model

        def updated(self, report):
            if report.global_step % 4 == 0:
                self.model.state.zero_()

    def loss(model, batch):
        (words,) = batch
        logits = model(words[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    torch.manual_seed(0)
    model = Buffered()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=16,
        shards=1,
    )
    trainer.fit(streams(), epochs=3, shuffle=False, callbacks=[Reset()])
    return trainer.model


if __name__ == "__main__":
    ported()
