"""Points in a ring or not, with DistributedDataParallel.

torchrun --nproc-per-node 2 ddp_theirs.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rings(rows: int, seed: int) -> TensorDataset:
    points = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, ((points.norm(dim=1) - 1.2).abs() < 0.5).long())


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(2, 64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 2),
        )


def main() -> None:
    has_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else "cpu"
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device))
    torch.manual_seed(rank)  # else every rank drops the same units
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train, test = rings(5000, seed=0), rings(1001, seed=1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=64 // world, sampler=sampler)
    test_loader = DataLoader(test, batch_size=64, sampler=DistributedSampler(test, shuffle=False))
    first = 0
    if Path("rings.pt").exists():
        state = torch.load("rings.pt", map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    for epoch in range(first, 5):
        sampler.set_epoch(epoch)
        model.train()
        for points, classes in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(points.to(device)), classes.to(device)).backward()
            optimizer.step()
        model.eval()
        sums = torch.zeros(3, device=device)  # loss, right ones, rows
        with torch.no_grad():
            for points, classes in test_loader:
                logits, classes = model(points.to(device)), classes.to(device)
                sums[0] += F.cross_entropy(logits, classes, reduction="sum")
                sums[1] += (logits.argmax(1) == classes).sum()
                sums[2] += len(classes)
        dist.all_reduce(sums)
        loss, right, rows = sums.tolist()
        if rank == 0:
            print(
                f"epoch {epoch + 1}: loss {loss / rows:.4f}  accuracy {right / rows:.4f}",
                flush=True,
            )
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, "rings.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
