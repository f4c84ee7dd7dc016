"""A queue of keys in ``Shared``: the values of a plain loop, for any number of shards."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.digests import digest
from support.runs import command, inspected, run

import quorate

SCRIPT = Path(__file__).parents[1] / "scripts" / "queue_of_keys.py"
STEPS = 8


def loaded() -> ModuleType:
    """Return the script's module, whose queue is as at the beginning."""
    spec = importlib.util.spec_from_file_location("queue_of_keys", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["queue_of_keys"] = module
    spec.loader.exec_module(module)
    return module


def plain(module: ModuleType) -> Any:
    """Return the parameters and the queue after a plain loop over whole batches."""
    fast, slow = module.encoder, module.slow
    keys, data = module.queue.keys.clone(), module.data()
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        start = step * module.BATCH % len(data)
        one, other = data[start : start + module.BATCH]
        queries = F.normalize(fast(one), dim=1)
        with torch.no_grad():
            new = F.normalize(slow(other), dim=1)
        logits = torch.cat([(queries * new).sum(1, keepdim=True), queries @ keys.T], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keys = torch.cat([keys[len(new) :], new])
        with torch.no_grad():
            for mine, its in zip(slow.parameters(), fast.parameters(), strict=True):
                mine.lerp_(its, 0.01)
    return [*fast.parameters()], keys


@pytest.fixture(autouse=True)
def no_module_is_left() -> Iterator[None]:
    """Forget the script's module: a ``Shared`` that lives on is part of every later training."""
    yield
    sys.modules.pop("queue_of_keys", None)


@pytest.mark.parametrize("shards", [1, 4, 24])
def test_a_queue_in_shared_is_that_of_a_plain_loop(shards: int) -> None:
    wanted, keys = plain(loaded())
    module = loaded()
    trainer = quorate.Trainer(
        module.encoder,
        quorate.Gather(module.represent, module.contrast),
        totals={"keys": lambda _: {}},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=module.BATCH,
        shards=shards,
        devices="cpu",
        workers=1,
        compute=quorate.Compute(strict=True),
    )
    trainer.fit(module.data(), steps=STEPS, shuffle=False, callbacks=[module.Enqueue()])
    torch.testing.assert_close([*trainer.model.parameters()], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.queue.keys, keys, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_its_bits_are_the_same_on_two_workers_and_after_a_resume(tmp_path: Path) -> None:
    ways = {
        "one": [("towers", "1", "12")],
        "two": [("processes", "2", "12")],
        "resumed": [("processes", "2", "5"), ("towers", "1", "12")],
    }
    digests, queues = set(), set()
    for name, parts in ways.items():
        for engine, workers, steps in parts:
            options = ("--engine", engine, "--workers", workers, "--strict")
            options += ("--run-dir", str(tmp_path / name))
            assert run(command(SCRIPT, steps, options=options)).code == 0
        facts = inspected(tmp_path / name)
        digests.add(facts["digest"])
        shared = load_file(Path(facts["checkpoint"]) / "shared.safetensors")
        queues.add(digest(shared.items()))
    assert len(digests) == len(queues) == 1
