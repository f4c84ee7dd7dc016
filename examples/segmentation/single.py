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

import tiles
import torch
from loss import iou, loss_with
from model import WEIGHTS
from overlays import picture, save
from recipe import Recipe, batches, parse
from safetensors.torch import save_file
from target import of_run, reached
from torch.utils.data import DataLoader


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    options = parse(__doc__.splitlines()[0])
    recipe = Recipe.of(options)
    if options.above is not None:
        of_run(options.above)  # an error now is better than one after ten minutes
    train, test = tiles.load(options.data, colour=options.colour)
    torch.manual_seed(0)
    loss = loss_with(tiles.class_weights(train))
    model = recipe.network().to(memory_format=torch.channels_last)
    optimizer = recipe.optimizer(list(model.parameters()))
    schedule = recipe.schedule(optimizer)
    for update, batch in enumerate(islice(batches(train, recipe.batch_size), options.updates), 1):
        found = loss(model, batch)
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        schedule.step()
        if update % 20 == 0:
            print(f"step {update}: loss {found['loss'].item():.4f}", flush=True)
    model.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for batch in DataLoader(test, batch_size=16):
            total = total + loss(model, batch)["confusion"]
    options.run_dir.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, options.run_dir / WEIGHTS)
    save(options.run_dir / "overlay.png", picture(model, test))
    if not reached(iou(total), options.target, options.above, options.margin):
        sys.exit(1)


if __name__ == "__main__":
    main()
