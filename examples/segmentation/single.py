"""Climates from a grey image of the earth. single.py is plain PyTorch, train.py has quorate.

    python examples/segmentation/single.py
    python examples/segmentation/train.py                                  # every device
    quorate run --devices cpu --workers 1 examples/segmentation/train.py   # one CPU worker
    quorate run --devices cuda:0,cuda:1 examples/segmentation/train.py     # two GPUs

Both end with exit code 1 if the mean IoU on bands of longitude that were held out is below
--target, or less than --margin above that of the run in --above, which --baseline made.
"""

from __future__ import annotations

import sys
from itertools import islice

import torch
from loss import iou, loss_with
from model import WEIGHTS
from overlays import picture, save
from recipe import Recipe, batches, parse, sets
from safetensors.torch import save_file
from target import reached
from tiles import class_weights
from torch.utils.data import DataLoader


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    options = parse(__doc__.splitlines()[0], threads=True)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    recipe = Recipe.of(options)
    train, test = sets(options)
    torch.manual_seed(recipe.seed)
    loss = loss_with(class_weights(train), test.tested)
    model = recipe.network(train).to(memory_format=torch.channels_last)
    averaged = recipe.averaged(model)
    optimizer = recipe.optimizer(list(model.parameters()))
    schedule = recipe.schedule(optimizer)
    rows = batches(train, recipe.batch_size, recipe.seed)
    for update, batch in enumerate(islice(rows, options.updates), 1):
        found = loss(model, batch)
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        schedule.step()
        if averaged is not None:
            averaged.update_parameters(model)
        if update % 20 == 0:
            print(f"step {update}: loss {found['loss'].item():.4f}", flush=True)
    model = model if averaged is None else averaged.module
    model.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for batch in DataLoader(test, batch_size=16):
            total = total + loss(model, batch)["confusion"]
    train.legend.save(options.run_dir)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, options.run_dir / WEIGHTS)
    save(options.run_dir / "overlay.png", picture(model, test))
    if not reached(iou(total, test.legend), test, options):
        sys.exit(1)


if __name__ == "__main__":
    main()
