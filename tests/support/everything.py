"""The training of tests/scripts/everything.py, in this process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support import front_door

import quorate
from quorate.replica.digest import digest

SCRIPT = Path(__file__).parents[1] / "scripts" / "everything.py"


def everything() -> ModuleType:
    spec = importlib.util.spec_from_file_location("everything", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EVERYTHING = everything()


def trained(workers: int, shards: int, *, rows: int = 110, **options: Any) -> quorate.Trainer:
    torch.manual_seed(3)
    defaults: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.Adam(params, lr=3e-3),
        "batch_size": 24,
        "clip_norm": 1.0,
        "ema_decay": 0.99,
        "schedule": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20),
    }
    trainer = front_door.trainer(
        EVERYTHING.Everything(),
        EVERYTHING.loss,
        shards=shards,
        devices="cpu",
        workers=workers,
        **defaults | options,
    )
    for _ in trainer.updates(EVERYTHING.Sentences(rows), epochs=2):
        pass
    return trainer


def digest_of(trainer: quorate.Trainer) -> str:
    assert trainer.averaged_model is not None
    averaged = trainer.averaged_model.state_dict()
    return digest([*trainer.model.state_dict().items(), *averaged.items()])
