"""Diffusion: UNet2DModel and the noise schedule of diffusers.

Not compared: a plain loop draws different noise and time steps.
"""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(24, 1, 8, 8, generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    size = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1}
    return UNet2DModel(block_out_channels=(8, 16), norm_num_groups=4, **blocks, **size)


noising = DDPMScheduler(num_train_timesteps=100)


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(pictures(), batch_size=8)
    for _ in range(3):
        for (images,) in loader:
            noise = torch.randn_like(images)
            times = torch.randint(100, (len(images),))
            found = model(noising.add_noise(images, noise, times), times).sample
            loss = F.mse_loss(found, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(pictures(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for (images,) in loader:
            noise = torch.randn_like(images)
            times = torch.randint(100, (len(images),))
            found = model(noising.add_noise(images, noise, times), times).sample
            loss = F.mse_loss(found, noise)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        (images,) = batch
        noise = torch.randn_like(images)
        times = torch.randint(100, (len(images),))
        found = model(noising.add_noise(images, noise, times), times).sample
        return F.mse_loss(found, noise)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=8,
        shards=2,
    )
    trainer.fit(pictures(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
