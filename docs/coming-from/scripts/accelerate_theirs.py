"""Bars in noise, upright or lying, with Accelerate.

accelerate launch --num_processes 2 accelerate_theirs.py, or with torchrun on a CPU
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def bars(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 1, 8, 8, generator=generator)
    lying = torch.randint(2, (rows,), generator=generator)
    places = torch.randint(8, (rows,), generator=generator)
    for image, is_lying, place in zip(images[:, 0], lying, places, strict=True):
        (image if is_lying else image.T)[place] += 1.5
    return TensorDataset(images, lying)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 2)
        )


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(bars(2000, seed=0), batch_size=16, shuffle=True)  # of one process
    test_loader = DataLoader(bars(501, seed=1), batch_size=64)
    # The prepared schedule makes a step per process and update: 2 x 32 an epoch.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 2 * 32)
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    for epoch in range(3):
        model.train()
        for images, lying in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), lying))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right, losses = [], []
        with torch.no_grad():
            for images, lying in test_loader:
                logits, lying = accelerator.gather_for_metrics((model(images), lying))
                losses.append(F.cross_entropy(logits, lying, reduction="none"))
                right.append(logits.argmax(1) == lying)
        loss, accuracy = torch.cat(losses).mean(), torch.cat(right).float().mean()
        accelerator.print(f"epoch {epoch + 1}: loss {loss:.4f}  accuracy {accuracy:.4f}")
        accelerator.save_state(f"bars/epoch-{epoch + 1}")


if __name__ == "__main__":
    main()
