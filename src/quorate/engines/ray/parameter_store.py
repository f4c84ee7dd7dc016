"""The parameter store: values for workers in Ray's object store, put there once for all readers."""

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

    The coordinator's thread calls all methods, while the values do not change.

    Args:
        arena: the coordinator's, with the values.
        node: the coordinator's own.
        servers: the owners of the parameters, unless the coordinator is the owner.
    """

    def __init__(self, arena: Arena, node: OwnNode, servers: RayServers | None = None) -> None:
        self.arena = arena
        self._node = node
        self._servers = servers
        self._newest: dict[tuple[ArenaPart, ...], tuple[int, list[Ref]]] = {}

    @property
    def parameters(self) -> ArenaPart:
        """The part with the newest parameters: slices of the servers, or the coordinator's."""
        is_there = self._servers is not None and self._servers.have_newest
        return ArenaPart.SLICES if is_there else ArenaPart.PARAMETERS

    def refs(self, parts: Sequence[ArenaPart], version: int, slot: int | None = None) -> list[Ref]:
        """Return the objects of parts of the arena; a new version is put into the store first.

        Args:
            slot: the number of the slot, if the part is one.
        """
        if self._servers is not None and parts[0] == ArenaPart.SLICES:
            return [*self._servers.refs, *self.refs(parts[1:], version)]
        return self._put(tuple(parts), version, lambda part: image_of(self.arena, part, slot))

    def shared(self, version: int, fd: int) -> list[Ref]:
        """Return the object of the tensors of ``Shared``; a new version is put first.

        Args:
            fd: of the memory with the tensors.
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
    """Return the bytes of a segment, which stays the caller's."""
    segment = Segment(os.fstat(fd).st_size, os.dup(fd))
    return segment.array(segment.nbytes)


class SentVersions:
    """The versions of values that one worker's actor has, so that no version is sent twice.

    Args:
        store: with all values.
    """

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._versions: dict[tuple[ArenaPart, ...], int] = {}

    def missing(
        self, snapshot: Sequence[int] | None, *, averaged: bool
    ) -> tuple[list[ArenaPart], list[Ref]]:
        """Return the parts and objects that a shard needs and the actor lacks; now they are sent.

        Args:
            snapshot: slot and version, if the shard is computed from a snapshot.
            averaged: whether the shard is computed from averaged parameters.
        """
        if snapshot:
            slot, version = snapshot
            parts = [ArenaPart.SNAPSHOT]
        else:
            slot, version = None, self._store.arena.published
            parameters = ArenaPart.AVERAGE if averaged else self._store.parameters
            parts = [parameters, ArenaPart.BUFFERS]
        if self._versions.get(key := tuple(parts)) == version:
            return [], []
        if ArenaPart.BUFFERS in parts:  # plain and averaged parameters both come with buffers
            known = self._versions.items()
            self._versions = {each: n for each, n in known if ArenaPart.BUFFERS not in each}
        self._versions[key] = version
        return parts, self._store.refs(parts, version, slot)
