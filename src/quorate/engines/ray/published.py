"""Published: what workers compute from, put into the object store once, however many read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from quorate.engines.processes.arena import Arena, Image
from quorate.engines.ray.own_node import OwnNode
from quorate.engines.ray.relayed import Part, Ref, image_of
from quorate.engines.ray.servers import RayServers
from quorate.machine.shared_memory import Segment


class Published:
    """The coordinator's values as objects. An older version is gone with its last reader.

    All of it is called in the coordinator's thread, while the values are what they are to be.

    Args:
        arena: where the coordinator has them.
        node: the coordinator's own.
        servers: that have the parameters in its place, if any.
    """

    def __init__(self, arena: Arena, node: OwnNode, servers: RayServers | None = None) -> None:
        self._arena = arena
        self._node = node
        self.servers = servers
        self._newest: dict[tuple[Part, ...], tuple[int, list[Ref]]] = {}

    @property
    def parameters(self) -> Part:
        """What parameters are to be computed from."""
        is_there = self.servers is not None and self.servers.have_newest
        return Part.SLICES if is_there else Part.PARAMETERS

    def refs(self, parts: Sequence[Part], version: int, slot: int | None = None) -> list[Ref]:
        """Return the objects of parts of the arena, put there if this version is a new one.

        Args:
            slot: the number of it, if the part is one.
        """
        if self.servers is not None and parts[0] == Part.SLICES:
            return [*self.servers.refs, *self.refs(parts[1:], version)]
        return self._put(tuple(parts), version, lambda part: image_of(self._arena, part, slot))

    def shared(self, version: int, fd: int) -> list[Ref]:
        """Return the object of the tensors of ``Shared``, put there if this version is a new one.

        Args:
            fd: of the memory that they lie in.
        """
        return self._put((Part.SHARED,), version, lambda _: image_in(fd))

    def _put(
        self, parts: tuple[Part, ...], version: int, image: Callable[[Part], Image]
    ) -> list[Ref]:
        known = self._newest.get(parts)
        if known is not None and known[0] == version:
            return known[1]
        refs = [self._node.put(image(part)) for part in parts]
        self._newest[parts] = (version, refs)
        return refs


def image_in(fd: int) -> Image:
    """Return the bytes of a segment, which stays another's."""
    segment = Segment(os.fstat(fd).st_size, os.dup(fd))
    return segment.array(segment.nbytes)


class Given:
    """What one worker's agent was given to compute from, so that it is given nothing twice.

    Args:
        published: all there is.
        arena: the coordinator's.
    """

    def __init__(self, published: Published, arena: Arena) -> None:
        self._published = published
        self._arena = arena
        self._versions: dict[tuple[Part, ...], int] = {}

    def missing(
        self, snapshot: Sequence[int] | None, *, averaged: bool
    ) -> tuple[list[Part], list[Ref]]:
        """Return what a shard is computed from, unless it was given: from now on it is.

        Args:
            snapshot: its slot and version, if the shard is computed from one.
            averaged: whether from averaged parameters.
        """
        if snapshot:
            slot, version = snapshot
            parts = [Part.SNAPSHOT]
        else:
            slot, version = None, self._arena.published
            parts = [Part.AVERAGE if averaged else self._published.parameters, Part.BUFFERS]
        if self._versions.get(key := tuple(parts)) == version:
            return [], []
        if Part.BUFFERS in parts:  # both kinds of values come with buffers
            known = self._versions.items()
            self._versions = {each: n for each, n in known if Part.BUFFERS not in each}
        self._versions[key] = version
        return parts, self._published.refs(parts, version, slot)
