"""Fine-tuning: LoRA by peft on GPT-2, all but the adapters frozen."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import quorate


def texts() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(80, (48, 12), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=80, n_positions=16, n_embd=32, n_layer=2, n_head=2, **still)
    adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(config), adapters)


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loader = DataLoader(texts(), batch_size=16)
    for _ in range(3):
        for (words,) in loader:
            loss = model(input_ids=words, labels=words).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loader = DataLoader(texts(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for (words,) in loader:
            loss = model(input_ids=words, labels=words).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        (words,) = batch
        return model(input_ids=words, labels=words).loss

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=16,
        shards=2,
    )
    trainer.fit(texts(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
