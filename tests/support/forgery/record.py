"""Records with a key or a value that cannot be."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

from support.forgery.forged import ODD, Forged, Json
from support.forgery.wrong import FREE, at, is_wrong

# What is compared; of an entry that is none of these nothing is known here.
COMPARED = {
    *("format", "global_step", "epoch", "seed", "shards", "batch_size", "rows", "shuffle"),
    *("last", "sampling", "sampled_rows", "order_sha256"),
    *("is_ordered", "update", "ema_decay", "account", "order", "optimizer", "files"),
    *("optimizer_state", "optimizer_attributes", "optimizer_groups", "schedule_state"),
    "amendments",
}
# Records of before have none of these.
OPTIONAL = (FREE - {"saved_at", "optimizer_numbers"}) | {
    *("is_ordered", "ema_decay", "last", "sampling", "sampled_rows", "order_sha256"),
    *("optimizer_state", "optimizer_attributes", "optimizer_groups", "schedule_state"),
    "amendments",
}


def _places(value: Json, trail: tuple[Json, ...] = ()) -> Iterator[tuple[Json, ...]]:
    """Yield the keys and indices that lead to every value at every level."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if not trail and key == "hyperparameters":  # of any optimizer: anything
            yield (key,)
            continue
        yield (*trail, key)
        if isinstance(inner, (dict, list)):
            yield from _places(inner, (*trail, key))


def forged_record(forged: Forged) -> str:
    """Take a key away, name it otherwise, add one, or give one a value that it cannot have."""
    chance, record = forged.chance, forged.record
    known = {*COMPARED, *FREE}
    trail = chance.choice([place for place in _places(record) if place[0] in known])
    inside, key = at(record, trail)
    old, where = inside[key], ".".join(map(str, trail))
    way = chance.choice(["missing", "renamed", "odd", "beside", "near"])
    if way == "missing" and isinstance(inside, dict) and trail[0] not in OPTIONAL:
        del inside[key]
        return f"{where} is missing"
    if way == "renamed" and isinstance(inside, dict) and not _is_free(trail, inner=True):
        del inside[key]
        inside[chance.choice(["digest", "\x1b]0;title\x07", f"{key}s", "../" + str(key)])] = old
        return f"{where} has another name"
    if way == "beside" and len(trail) == 1:
        inside[chance.choice(["digest", "checkpoint", "\x1b[31m", "same_bit", ""])] = "forged"
        return "an entry that nobody knows"
    if way == "near" and not _is_free(trail) and not isinstance(old, (dict, list)):
        near = _near(old, chance)
        if near is not None and near != old and is_wrong(trail, near, record):
            inside[key] = near
            return f"{where} is {near!r}, and was {old!r}"
    odd = chance.choice([value for value in ODD if is_wrong(trail, value, record)])
    inside[key] = copy.deepcopy(odd)
    return f"{where} is {odd!r}, and was {old!r}"


def _is_free(trail: tuple[Json, ...], *, inner: bool = False) -> bool:
    return trail[0] in FREE and (inner is False or len(trail) > 1)


def _near(old: Json, chance: random.Random) -> Json:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return old + chance.choice([-1, 1, 7, 1 << 40])
    if isinstance(old, str):
        return chance.choice([old[:-1], old + "x", old.upper(), old + "\n"])
    return None
