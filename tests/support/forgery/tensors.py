"""Tensors that the record or the model has otherwise, in files that are sound by themselves."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from support.forgery.forged import TENSORS, Forged


def forged_tensors(forged: Forged) -> str:
    """Files that are sound by themselves, and hold other tensors than the record or the model."""
    chance = forged.chance
    file = chance.choice(TENSORS)
    held = forged.unpack(file)
    name = chance.choice([*held])
    dtype, shape, content = held[name]
    both = ("model.safetensors", "averaged.safetensors")
    files = [file]

    def missing(held: dict[str, Any]) -> None:
        del held[name]

    def renamed(held: dict[str, Any]) -> None:
        held[chance_name] = held.pop(name)

    def more(held: dict[str, Any]) -> None:
        held[chance_name] = (dtype, shape, content)

    def shaped(held: dict[str, Any]) -> None:
        held[name] = (dtype, [*shape, 1], content)

    def wider(held: dict[str, Any]) -> None:
        held[name] = (dtype, [2, *shape], content * 2)

    def typed(held: dict[str, Any]) -> None:
        other = {"F32": "I32", "I64": "F64"}[dtype]
        held[name] = (other, shape, content)

    chance_name = chance.choice(
        [f"{name}x", "exp_avg.nobody", "nothing", "", "\x1b[2J.a", "a" * 999]
    )
    ways: dict[str, Callable[[dict[str, Any]], None]] = {
        "missing": missing, "under another name": renamed, "and one more": more,
        "of another shape": shaped, "wider": wider, "of another dtype": typed,
    }  # fmt: skip
    way = chance.choice([*ways])
    if file in both and chance.random() < 0.6:  # nothing but the model can tell
        files = [*both]
        if name in forged.record["order"] and way in ("missing", "under another name"):
            place = forged.record["order"].index(name)
            forged.record["order"][place : place + 1] = [] if way == "missing" else [chance_name]
        elif way == "and one more":
            forged.record["order"].append(chance_name)
    if file == "optimizer.safetensors" and dtype == "F32" and shape == [] and chance.random() < 0.5:
        value = chance.choice([math.nan, math.inf, -1.0])
        held[name] = (dtype, shape, struct.pack("<f", value))
        forged.repack(file, held)
        return f"{file}: {name} is {value}"
    for one in files:
        held = forged.unpack(one)
        ways[way](held)
        forged.repack(one, held)
    return f"{' and '.join(files)}: {name} is {way} ({chance_name!r})"
