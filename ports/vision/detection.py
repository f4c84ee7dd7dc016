"""Detection: images with lists of boxes, a collate function, a loss over boxes.

Images have unequal numbers of boxes, so the loss returns the number as weight.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import quorate


class Scenes(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        boxes = torch.rand(1 + row % 4, 4, generator=generator)  # centre and size
        return torch.randn(3, 16, 16, generator=generator), boxes


def side_by_side(samples):
    images, boxes = zip(*samples, strict=True)
    return torch.stack(images), list(boxes)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 3))
        self.boxes = nn.Conv2d(16, 4, 1)

    def forward(self, images):
        return self.boxes(self.body(images).relu()).flatten(2).transpose(1, 2).sigmoid()


def nearest_boxes_loss(found, boxes):
    """Return the mean, over true boxes, of the distance to the nearest anchor's box."""
    terms = []
    for anchors, true in zip(found, boxes, strict=True):
        nearest = torch.cdist(true[:, :2], anchors[:, :2].detach()).argmin(1)
        terms.append(F.smooth_l1_loss(anchors[nearest], true, reduction="none").sum(1))
    return torch.cat(terms).mean()


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Scenes(), batch_size=10, collate_fn=side_by_side)
    for _ in range(3):
        for images, boxes in loader:
            loss = nearest_boxes_loss(model(images), boxes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Scenes(), batch_size=10, collate_fn=side_by_side)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for images, boxes in loader:
            loss = nearest_boxes_loss(model(images), boxes)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        images, boxes = batch
        found = nearest_boxes_loss(model(images), boxes)
        return {"loss": found, "weight": sum(map(len, boxes))}

    torch.manual_seed(0)
    model = Detector()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        batch_size=10,
        shards=2,
        loading=quorate.Loading(collate=side_by_side),
    )
    trainer.fit(Scenes(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
