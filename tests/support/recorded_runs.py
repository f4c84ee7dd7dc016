"""Recorded runs: of a script that is verified, and some that are made up."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.commands.verify.records import (
    Call,
    EndRecord,
    Event,
    Recording,
    ShardRecord,
    UpdateRecord,
)
from quorate.commands.verify.verdict import Run

SCRIPT = Path(__file__).parents[1] / "scripts" / "verified.py"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("verified", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VERIFIED = _loaded()


def call(name: str, given: Sequence[str], made: Sequence[str], **more: Any) -> Call:
    return Call(name, tuple(given), tuple(made), **more)


def shard(step: int, number: int, **changes: Any) -> ShardRecord:
    rows = [10 * step + 2 * number, 10 * step + 2 * number + 1]
    plain = ShardRecord(
        worker=0,
        device="cpu",
        step=step,
        shard=number,
        rows=rows,
        samples=[f"row {row}" for row in rows],
        batch=f"batch {step} {number}",
        forward=[
            Event("in", "", "Net", 0, "x"),
            Event("in", "first", "Linear", 0, "x"),
            Event("out", "first", "Linear", 0, "y"),
            Event("in", "last", "Linear", 0, "relu y"),
            Event("out", "last", "Linear", 0, "z"),
            Event("out", "", "Net", 0, "z"),
        ],
        backward=[Event("grad", "", "Net", 0, "dz"), Event("grad", "first", "Linear", 0, "dy")],
        metrics={"loss": 0.5, "weight": 2.0},
        gradient={"first.weight": "g1", "last.weight": "g2"},
        buffers="b",
    )
    return replace(plain, **changes)


def recording(**changes: Any) -> Recording:
    """Two updates of two shards; with changes, of shard 1 of the second update, they differ."""
    shards = [shard(step, number) for step in (0, 1) for number in (0, 1)]
    shards[-1] = replace(shards[-1], **changes)
    tensors = [{"first.weight": f"w{n}", "last.weight": f"v{n}"} for n in range(3)]
    if changes:
        tensors[2]["last.weight"] = "other"
    return Recording(
        facts={"shards": 2, "steps_per_epoch": 2},
        updates=[UpdateRecord(n, n - 1, 0.1, tensors[n], {0: 0, 1: 0}) for n in range(3)],
        shards={(each.step, each.shard): [each] for each in shards},
        end=EndRecord(2, ""),
    )


def changed(position: int, **changes: Any) -> list[Event]:
    events = shard(1, 1).forward
    return [*events[:position], replace(events[position], **changes), *events[position + 1 :]]


def run(label: str, found: Recording, code: int = 0, error: str = "") -> Run:
    return Run(label, 1, found, code, error)
