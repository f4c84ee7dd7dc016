"""Train a case by its name, or compute it with a plain loop: ``stranger.py NAME [--plain FILE]``.

The plain loop is torch alone: shard after shard, gradients of means weighted by rows, one step of
the optimizer, buffers of each shard from the same values and averaged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cases  # noqa: F401  lists them
from case import BATCH, CASES, SHARDS, STEPS, Case

import quorate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--plain", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    case = CASES[arguments.name]()
    if arguments.plain is not None:
        torch.set_num_threads(1)
        torch.save(plain(case), arguments.plain)
        return
    trainer = quorate.Trainer(
        case.model,
        case.loss,
        optimizer=quorate.Optimize(case.optimizer, **case.optimize),
        batch_size=BATCH,
        shards=SHARDS,
        seed=0,
        **case.settings,
    )
    trainer.fit(case.data, steps=arguments.steps, shuffle=False, callbacks=list(case.callbacks))


def plain(case: Case) -> dict[str, torch.Tensor]:
    """Return the state dict after a plain loop over the same shards."""
    model, data = case.model, case.data
    rows, collate = len(data), torch.utils.data.default_collate
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = case.optimizer(parameters)
    schedule = case.optimize.get("schedule")
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(STEPS):
        start = step * BATCH % rows
        buffers = [b.clone() for b in model.buffers()]
        sums: list[Any] = [None] * len(parameters)
        averaged = [torch.zeros_like(b, dtype=torch.float64) for b in buffers]
        firsts: list[torch.Tensor] = []
        for shard in range(SHARDS):
            chosen = range(start + shard * BATCH // SHARDS, start + (shard + 1) * BATCH // SHARDS)
            batch = collate([data[row] for row in chosen])
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.data.copy_(value)
            model.train()
            for p in parameters:
                p.grad = None
            returned = case.loss(model, batch)
            loss = returned["loss"] if isinstance(returned, dict) else returned
            loss.backward()
            for n, p in enumerate(parameters):
                if p.grad is not None:
                    grad = p.grad.detach().to_dense() * len(chosen)
                    sums[n] = grad if sums[n] is None else sums[n] + grad
            for total, buffer in zip(averaged, model.buffers(), strict=True):
                total += buffer.detach().to(torch.float64) * len(chosen) / BATCH
            if shard == 0:
                firsts = [b.detach().clone() for b in model.buffers()]
        with torch.no_grad():
            for buffer, total, first in zip(model.buffers(), averaged, firsts, strict=True):
                buffer.copy_(total if buffer.is_floating_point() else first)
        for p, total in zip(parameters, sums, strict=True):
            p.grad = None if total is None else total / BATCH
        if (norm := case.optimize.get("clip_norm")) is not None:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if case.after is not None:
            case.after(model, optimizer, step + 1)
    return {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


if __name__ == "__main__":
    main()
