"""A sine in noise, with Lightning.

python lightning_theirs.py
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def waves(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, generator=generator) * 6 - 3
    return TensorDataset(x, torch.sin(2 * x) + 0.1 * torch.randn(rows, 1, generator=generator))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )


class Wave(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        x, y = batch
        predicted = self.net(x)
        self.log("val_loss", F.mse_loss(predicted, y), sync_dist=True)
        self.log("val_error", (predicted - y).abs().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(0, workers=True)
    trainer = L.Trainer(
        accelerator="auto",
        devices=2,
        strategy="ddp",
        max_epochs=20,
        gradient_clip_val=1.0,
        deterministic=True,
        default_root_dir="waves",
        callbacks=[
            EarlyStopping("val_loss", patience=3),
            ModelCheckpoint(monitor="val_loss", save_last=True),
        ],
    )
    trainer.fit(
        Wave(),
        DataLoader(waves(4000, seed=0), batch_size=32, shuffle=True),  # of one process
        DataLoader(waves(1001, seed=1), batch_size=32),
    )
    if trainer.is_global_zero:
        print({name: f"{value:.4f}" for name, value in trainer.callback_metrics.items()})
