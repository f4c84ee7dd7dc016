"""One port, trained: what ``ports/run.py`` starts, in the environment of the ports.

    quorate run --devices cpu --workers 2 ports/trained.py FILE    a port; prints JSON
    python ports/trained.py --all OUT FILE...                      in all ways; JSON in OUT

All ways are the plain loop, Accelerate's on one process, and the port on one tower and on two. How
far the plain loop moves the parameters is noted too: a distance to it says something only then.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quorate.errors import SameBitsError, UserError
from quorate.replica.digest import digest
from quorate.settings import overriding


def loaded(path: Path) -> ModuleType:
    """Return a port's module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def digest_of(model: torch.nn.Module) -> str:
    """Return the digest of parameters and buffers that ``quorate inspect`` prints."""
    return digest(model.state_dict().items())


def seeded(train: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Train as a process of its own would that has seeded all generators with 0."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return train()


class Moved:
    """How far optimizers have moved their parameters since the first step within the block."""

    def __enter__(self) -> Moved:
        self._before: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._hook = register_optimizer_step_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._before:
                    self._before[parameter] = parameter.detach().clone()

    def most(self) -> float:
        """Return the largest absolute difference."""
        return max((p - old).abs().max().item() for p, old in self._before.items())


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the largest absolute difference between two models' parameters, in their order.

    Names may differ: Keras numbers a model after how many there were.
    """
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def on_towers(module: ModuleType, workers: int) -> torch.nn.Module:
    """Return the model that the port has trained on so many threads."""
    settings = {"devices": "cpu", "workers": workers, "engine": "towers"}
    with overriding(settings):
        return seeded(module.ported)


def all_ways(path: Path) -> dict[str, Any]:
    """Return what came of each way to train a port."""
    found: dict[str, Any] = {"port": f"{path.parent.name}/{path.stem}"}
    module = loaded(path)
    with Moved() as moved:
        plain = seeded(module.plain)
        found["moved"] = moved.most()
    if hasattr(module, "accelerated") and importlib.util.find_spec("accelerate"):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # or the first port's would stay
        found["accelerate"] = distance(seeded(module.accelerated), plain)
    try:
        one = on_towers(module, 1)
    except (UserError, SameBitsError) as refusal:
        return {**found, "refused": str(refusal)}
    found["distance"] = distance(one, plain)
    found["digests"] = {"1 tower": digest_of(one), "2 towers": digest_of(on_towers(module, 2))}
    return found


def main() -> None:
    """Train, and print what came of it; or in all ways, into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", type=Path, metavar="OUT", help="train in all ways; append to OUT")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as each worker has
    if options.all is None:
        module = loaded(options.files[0])
        model = seeded(module.ported)  # worker processes end in there
        found = {"digest": digest_of(model), "distance": distance(model, seeded(module.plain))}
        print(f"\n{json.dumps(found)}", flush=True)
        return
    for path in options.files:
        print(f"== {path}", flush=True)
        try:
            found = all_ways(path)
        except Exception as error:  # the table says so, and the other ports go on
            traceback.print_exc()
            name = f"{path.parent.name}/{path.stem}"
            found = {"port": name, "error": f"{type(error).__name__}: {error}"}
        with options.all.open("a") as out:
            print(json.dumps(found), file=out)
        gc.collect()


if __name__ == "__main__":
    main()
