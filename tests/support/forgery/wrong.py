"""Which values are wrong at which place of a record, by the words of docs/checkpoints.md."""

from __future__ import annotations

import math

from support.forgery.forged import Json

# What is free: any value of its type is that of some run. Of these only the type can be forged.
FREE = {
    *("engine", "devices", "device_types", "workers", "threads", "precision", "compile"),
    *("schedule", "clip_norm", "torch", "python", "processors", "row_sample", "hyperparameters"),
    *("doubts", "is_augmented", "saved_at", "optimizer_numbers", "deterministic"),
    "kernels",
}


def at(record: Json, trail: tuple[Json, ...]) -> tuple[Json, Json]:
    """Return what a place is in, and its key or index there."""
    for key in trail[:-1]:
        record = record[key]
    return record, trail[-1]


def is_wrong(trail: tuple[Json, ...], value: Json, record: dict[str, Json]) -> bool:
    """Whether a value at a place makes a record wrong, by the words of docs/checkpoints.md."""
    name, step = trail[0], record["global_step"]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 53
    is_line = isinstance(value, str) and not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in value)
    inner = len(trail) > 1
    if name in ("optimizer_groups", "schedule_state") and ("values" in trail or "dict" in trail):
        return _is_other_kind(trail, value, record)
    if name in ("optimizer_state", "schedule_state", "amendments") and not inner:
        return value is not None
    if name in ("optimizer_attributes", "optimizer_groups") and not inner:
        return value not in ({}, []) or isinstance(value, list) != (name == "optimizer_groups")
    if name == "amendments" and trail[1] in ("number", "frozen"):
        return not is_count
    if name == "amendments" and len(trail) == 2:
        return value != ([] if trail[1] == "switched_off" else {})
    if name in ("hyperparameters", "row_sample", "optimizer_numbers"):
        if name == "hyperparameters":
            return not (isinstance(value, list) and all(isinstance(v, dict) for v in value))
        if inner:
            return not (value is None or isinstance(value, str))
        return not (value == {} or (name == "row_sample" and value is None))
    if name == "doubts":
        return not (value == [] or (inner and isinstance(value, str)))
    if name in ("devices", "device_types", "processors"):
        return not (is_line if inner else value == [])
    if name in ("engine", "precision", "torch", "python"):
        return not is_line
    if name == "schedule":
        return not (value is None or is_line)
    if name in ("workers", "threads"):
        return not (value is None or (is_count and value >= 1))
    if name == "kernels":
        return value not in ("torch", "onednn")
    if name in ("compile", "is_augmented", "deterministic"):
        return not (isinstance(value, bool) or (name == "deterministic" and value is None))
    if name == "clip_norm":
        return not (value is None or (is_number and 0 < value < 10**300))
    if name == "saved_at":
        return not (is_number and 0 <= value < 250_000_000_000)
    if name == "seed":
        return value != record["seed"] or isinstance(value, (bool, float))
    if name == "ema_decay":
        return not (is_number and 0 < value < 1)
    if name == "account" and inner:
        if trail[1] in ("dropped_rows",):
            return not is_count
        if trail[1] == "not_finite":
            return not (is_count and value <= step + 1)
        if trail[1] == "evaluated_at":
            return not (is_count and value <= step)
        if trail[1] == "left_open" and len(trail) == 2:
            return value != []
        if trail[1] == "best" and len(trail) == 2:
            return value is not None
        if trail[1] == "tally" and len(trail) == 4:
            if trail[2:] == ("staleness", 1):
                return not (is_count and value == 0)
            return not is_count
    if name == "rows" and is_count and value:
        return True  # another data set
    if name == "optimizer":
        return value != record["optimizer"]
    return True


def _is_other_kind(trail: tuple[Json, ...], value: Json, record: dict[str, Json]) -> bool:
    """Whether a value in a tree is one that cannot have its place: a text for a number, say."""
    inside, key = at(record, trail)
    old = inside[key]
    if isinstance(value, float) and not math.isfinite(value):
        return True  # it is written as {"float": "nan"}
    if isinstance(old, list) and value == []:
        return "dict" in trail[-1:]  # a list may be of any length, but its keys have to be there
    if isinstance(old, (list, dict)) or isinstance(value, (list, dict)):
        return not (isinstance(old, (list, dict)) and value == old)
    if trail[-1] == 0 and trail[-3:-2] == ("dict",):
        return value != old  # a key
    if old is None:
        return False
    if isinstance(old, bool) or isinstance(value, bool):
        return type(old) is not type(value)
    if isinstance(old, (int, float)):
        return not (isinstance(value, (int, float)) and abs(value) < 10**300)
    return not isinstance(value, type(old))
