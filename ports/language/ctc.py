"""Speech to letters: spectrograms by torch.stft, a GRU, the CTC loss on padded targets."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import quorate


class Waves(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        letters = torch.randint(1, 6, (2 + row % 4,), generator=generator)
        pitches = letters.repeat_interleave(160)[:640].float()
        wave = F.pad(torch.sin(0.1 * pitches.cumsum(0)), (0, 640 - len(pitches)))
        return wave, letters


def padded(samples):
    waves, letters = zip(*samples, strict=True)
    lengths = torch.tensor([len(word) for word in letters])
    return torch.stack(waves), pad_sequence(letters, batch_first=True), lengths


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.gru = nn.GRU(33, 24, batch_first=True)
        self.head = nn.Linear(24, 6)

    def forward(self, waves):
        seen = torch.stft(waves, 64, 32, window=self.window, return_complex=True)
        return self.head(self.gru(seen.abs().log1p().transpose(1, 2))[0])


def ctc(logits, letters, lengths):
    chances = logits.log_softmax(2).transpose(0, 1)
    return F.ctc_loss(chances, letters, torch.full_like(lengths, len(chances)), lengths)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    loader = DataLoader(Waves(), batch_size=8, collate_fn=padded)
    for _ in range(3):
        for waves, letters, lengths in loader:
            loss = ctc(model(waves), letters, lengths)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    loader = DataLoader(Waves(), batch_size=8, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for waves, letters, lengths in loader:
            loss = ctc(model(waves), letters, lengths)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        waves, letters, lengths = batch
        return ctc(model(waves), letters, lengths)

    def sgd(params):
        return torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True)

    torch.manual_seed(0)
    model = Listener()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=quorate.Optimize(sgd, clip_norm=5.0),
        batch_size=8,
        shards=2,
        loading=quorate.Loading(collate=padded),
    )
    trainer.fit(Waves(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
