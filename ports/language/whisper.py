"""Speech to text: Whisper of transformers, from spectrograms to tokens."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperConfig, WhisperForConditionalGeneration

import quorate


class Speech(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        heard = torch.randn(8, 64, generator=generator)
        return {
            "input_features": heard,
            "labels": torch.randint(3, 60, (8,), generator=generator),
        }


def network() -> nn.Module:
    torch.manual_seed(0)
    size = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8}
    words = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    places = {"max_source_positions": 32, "max_target_positions": 16, "decoder_start_token_id": 1}
    config = WhisperConfig(dropout=0.0, **size, **heads, **widths, **words, **places)
    return WhisperForConditionalGeneration(config)


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(Speech(), batch_size=8)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(Speech(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    trainer = quorate.Trainer(
        network(),
        lambda model, batch: model(**batch),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
        batch_size=8,
        shards=2,
    )
    trainer.fit(Speech(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
