"""The training of ``tests/scripts/everything.py`` in this process: all influences on bits."""

from typing import Any

import torch
from scripts import everything
from support import front_door
from support.digests import digest_of
from support.references import References

import quorate


def trained(workers: int, shards: int, *, rows: int = 110, **options: Any) -> quorate.Trainer:
    """Train two epochs on towers, from the same weights each time.

    Args:
        workers: the number of towers.
        shards: of each update.
        rows: of the dataset; 110 leave an uneven last batch for the shards.
        options: more of ``Trainer``'s, and replacements of the defaults below.
    """
    torch.manual_seed(3)
    defaults: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.Adam(params, lr=3e-3),
        "batch_size": 24,
        "clip_norm": 1.0,
        "ema_decay": 0.99,
        "schedule": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20),
    }
    trainer = front_door.trainer(
        everything.Everything(),
        everything.loss,
        shards=shards,
        devices="cpu",
        workers=workers,
        **defaults | options,
    )
    for _ in trainer.updates(everything.Sentences(rows), epochs=2):
        pass
    return trainer


def digest_on_one_tower(references: References, shards: int, **options: Any) -> str:
    """Return the digest of ``trained(1, shards, **options)``, computed once per test run."""
    key = ("trained", shards, options)
    digest: str = references.once(lambda: digest_of(trained(1, shards, **options)), *key)
    return digest
