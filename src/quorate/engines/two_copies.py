"""An entry in memory that processes share: one process writes, any process reads, without a lock.

A lock could be held by a process that was killed or stopped. The memory holds two copies instead,
and the copy with the older version is overwritten, so that a whole copy exists at every moment.

A copy carries a CRC-32 of its version and content. A reader verifies the checksum, because nothing
else tells a half-written copy from a whole one: a processor that reorders stores (ARM does) may
show a new version before the content that belongs to it, and Python has no memory barrier.
"""

from __future__ import annotations

import struct
from mmap import mmap
from zlib import crc32

_COUNTED = struct.Struct("<qI")  # version; bytes of content
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<qII")  # the above, both together: before the content
_READS = 1000  # until memory of which no copy is whole counts as never written


class TwoCopies:
    """Two copies of an entry, of which the whole one with the higher version counts.

    One thread writes at a time; any number of threads and processes may read meanwhile. Nothing
    blocks.

    Args:
        memory: zeroed before the first write.
        start: of the two copies in ``memory``, a multiple of 8.
        most_bytes: of the content.
    """

    def __init__(self, memory: bytearray | mmap, start: int, most_bytes: int) -> None:
        size = TwoCopies.room(most_bytes) // 2
        self._memory = memory
        self._starts = (start, start + size)
        self._most_bytes = most_bytes
        self._versions = struct.Struct(f"<q{size - 8}xq")

    @staticmethod
    def room(most_bytes: int) -> int:
        """Return how many bytes the two copies of a content take: a multiple of 16."""
        return 2 * (-(-(_HEAD.size + most_bytes) // 8) * 8)

    def last_version(self) -> int:
        """Return the highest version in memory, whose copy may not be whole.

        A writer compares it with the version that it wrote last, to learn whether another process
        has written since.
        """
        return int(max(self._versions.unpack_from(self._memory, self._starts[0])))

    def write(self, version: int, content: bytes) -> None:
        """Write an entry; its version is that of the last one and 1."""
        counted = _COUNTED.pack(version, len(content))
        entry = counted + _CHECKSUM.pack(crc32(content, crc32(counted))) + content
        start = self._starts[version % 2]
        self._memory[start : start + len(entry)] = entry  # not pack_into(), which zeroes first

    def read(self) -> tuple[int, bytes]:
        """Return the version and the content of the newest whole entry; (0, b"") before the first.

        Torn copies last for the moment of a write. A process that is killed in a write leaves one
        torn copy behind, and the other one whole.
        """
        for _ in range(_READS):
            copies = [(self._whole(start), start) for start in self._starts]
            (version, content), start = max(copies)
            # Between the two reads this copy may have become the older one, and the newer one may
            # have been torn: then the entry found is older than one that was read before.
            if version >= 0 and _HEAD.unpack_from(self._memory, start)[0] == version:
                return version, content
        return 0, b""

    def _whole(self, start: int) -> tuple[int, bytes]:
        """Return version and content of a copy; a version of -1 where they do not fit together."""
        copy = bytes(self._memory[start : start + _HEAD.size + self._most_bytes])
        version, nbytes, checksum = _HEAD.unpack_from(copy)
        if version == nbytes == checksum == 0:
            return 0, b""
        content = copy[_HEAD.size : _HEAD.size + nbytes]
        is_whole = checksum == crc32(content, crc32(copy[: _COUNTED.size]))
        return (version, content) if is_whole and len(content) == nbytes else (-1, b"")
