"""Published: what workers compute from, put into the object store once, however many read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from quorate.engines.processes.arena import Arena, Image
from quorate.engines.ray.images import ArenaPart, Ref, image_of
from quorate.engines.ray.own_node import OwnNode
from quorate.engines.ray.servers import RayServers
from quorate.machine.shared_memory import Segment


class ParameterStore:
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
        self._newest: dict[tuple[ArenaPart, ...], tuple[int, list[Ref]]] = {}

    @property
    def parameters(self) -> ArenaPart:
        """What parameters are to be computed from."""
        is_there = self.servers is not None and self.servers.have_newest
        return ArenaPart.SLICES if is_there else ArenaPart.PARAMETERS

    def refs(self, parts: Sequence[ArenaPart], version: int, slot: int | None = None) -> list[Ref]:
        """Return the objects of parts of the arena, put there if this version is a new one.

        Args:
            slot: the number of it, if the part is one.
        """
        if self.servers is not None and parts[0] == ArenaPart.SLICES:
            return [*self.servers.refs, *self.refs(parts[1:], version)]
        return self._put(tuple(parts), version, lambda part: image_of(self._arena, part, slot))

    def shared(self, version: int, fd: int) -> list[Ref]:
        """Return the object of the tensors of ``Shared``, put there if this version is a new one.

        Args:
            fd: of the memory that they lie in.
        """
        return self._put((ArenaPart.SHARED,), version, lambda _: image_in(fd))

    def _put(
        self, parts: tuple[ArenaPart, ...], version: int, image: Callable[[ArenaPart], Image]
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


class SentVersions:
    """What one worker's agent was given to compute from, so that it is given nothing twice.

    Args:
        published: all there is.
        arena: the coordinator's.
    """

    def __init__(self, published: ParameterStore, arena: Arena) -> None:
        self._published = published
        self._arena = arena
        self._versions: dict[tuple[ArenaPart, ...], int] = {}

    def missing(
        self, snapshot: Sequence[int] | None, *, averaged: bool
    ) -> tuple[list[ArenaPart], list[Ref]]:
        """Return what a shard is computed from, unless it was given: from now on it is.

        Args:
            snapshot: its slot and version, if the shard is computed from one.
            averaged: whether from averaged parameters.
        """
        if snapshot:
            slot, version = snapshot
            parts = [ArenaPart.SNAPSHOT]
        else:
            slot, version = None, self._arena.published
            parts = [
                ArenaPart.AVERAGE if averaged else self._published.parameters,
                ArenaPart.BUFFERS,
            ]
        if self._versions.get(key := tuple(parts)) == version:
            return [], []
        if ArenaPart.BUFFERS in parts:  # both kinds of values come with buffers
            known = self._versions.items()
            self._versions = {each: n for each, n in known if ArenaPart.BUFFERS not in each}
        self._versions[key] = version
        return parts, self._published.refs(parts, version, slot)
