"""Published: what workers compute from, put into the object store once, however many read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from quorate.transports.processes.arena import Arena
from quorate.transports.ray.relayed import Part, image_of

Ref = Any  # ray.ObjectRef of an image


class Published:
    """The coordinator's values as objects. An older version is gone with its last reader.

    All of it is called in the coordinator's thread, while the values are what they are to be.

    Args:
        arena: where the coordinator has them.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._newest: dict[tuple[Part, ...], tuple[int, list[Ref]]] = {}

    def refs(self, parts: Sequence[Part], version: int, slot: int | None = None) -> list[Ref]:
        """Return the objects of parts of the arena, put there if this version is a new one.

        Args:
            slot: the number of it, if the part is one.
        """
        key = tuple(parts)
        known = self._newest.get(key)
        if known is not None and known[0] == version:
            return known[1]
        refs = [ray.put(image_of(self._arena, part, slot)) for part in parts]
        self._newest[key] = (version, refs)
        return refs
