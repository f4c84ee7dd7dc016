"""A LightningModule, with its training_step and optimizers unchanged."""

import lightning
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


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def training_step(self, batch, _):
        values, labels = batch
        return F.cross_entropy(self.body(values), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def plain() -> nn.Module:
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(rows(), batch_size=16))
    return model


def ported() -> nn.Module:
    trainer = quorate.Trainer(
        Classifier(),
        lambda model, batch: model.training_step(batch, 0),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
