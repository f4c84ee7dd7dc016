"""An entry in shared memory: a single process writes, any process reads, without a lock.

A killed or stopped process could hold a lock for ever. Instead the memory contains two copies, and
a writer overwrites the copy with the older version. At every moment at least one copy is whole.

A copy contains a CRC-32 of version and content. Readers verify the checksum, because nothing else
tells a half-written copy from a whole copy: a processor that reorders stores (ARM does) may show a
new version before the new content, and Python has no memory barrier.
"""

from __future__ import annotations

import struct
from mmap import mmap
from zlib import crc32

_COUNTED = struct.Struct("<qI")  # version; bytes of content
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<qII")  # the above, both together: before the content
_READS = 1000  # attempts, after which memory without a whole copy counts as never written


class TwoCopies:
    """Two copies of an entry: the whole copy with the higher version counts.

    One thread writes at a time; any number of threads and processes may read meanwhile. No method
    blocks.

    Args:
        memory: zeroed before the first write.
        start: of the two copies in ``memory``, a multiple of 8.
        most_bytes: the largest size of a content.
    """

    def __init__(self, memory: bytearray | mmap, start: int, most_bytes: int) -> None:
        size = TwoCopies.room(most_bytes) // 2
        self._memory = memory
        self._starts = (start, start + size)
        self._most_bytes = most_bytes
        self._versions = struct.Struct(f"<q{size - 8}xq")

    @staticmethod
    def room(most_bytes: int) -> int:
        """Return the size of two copies of a content in bytes, a multiple of 16."""
        return 2 * (-(-(_HEAD.size + most_bytes) // 8) * 8)

    @classmethod
    def row(
        cls, memory: bytearray | mmap, start: int, count: int, most_bytes: int
    ) -> list[TwoCopies]:
        """Return entries that lie one behind the other."""
        room = cls.room(most_bytes)
        return [cls(memory, start + n * room, most_bytes) for n in range(count)]

    def last_version(self) -> int:
        """Return the highest version in memory, perhaps of a copy in writing.

        A writer compares the result with its own last version: a difference means a write by
        another process.
        """
        return int(max(self._versions.unpack_from(self._memory, self._starts[0])))

    def write(self, version: int, content: bytes) -> None:
        """Write an entry; ``version`` is the last version plus 1."""
        counted = _COUNTED.pack(version, len(content))
        entry = counted + _CHECKSUM.pack(crc32(content, crc32(counted))) + content
        start = self._starts[version % 2]
        self._memory[start : start + len(entry)] = entry  # not pack_into(), which zeroes first

    def read(self) -> tuple[int, bytes]:
        """Return version and content of the newest whole entry; (0, b"") before the first write.

        A copy is torn for the moment of a write. A process killed in a write leaves a torn copy and
        a whole copy.
        """
        for _ in range(_READS):
            copies = [(self._whole(start), start) for start in self._starts]
            (version, content), start = max(copies)
            # Between the reads of the two copies a writer may have overwritten both, so that the
            # found entry may be older than an entry of an earlier call. If so, read again.
            if version >= 0 and _HEAD.unpack_from(self._memory, start)[0] == version:
                return version, content
        return 0, b""

    def _whole(self, start: int) -> tuple[int, bytes]:
        """Return version and content of a copy; a version of -1 if the copy is torn."""
        copy = bytes(self._memory[start : start + _HEAD.size + self._most_bytes])
        version, nbytes, checksum = _HEAD.unpack_from(copy)
        if version == nbytes == checksum == 0:
            return 0, b""
        content = copy[_HEAD.size : _HEAD.size + nbytes]
        is_whole = checksum == crc32(content, crc32(copy[: _COUNTED.size]))
        return (version, content) if is_whole and len(content) == nbytes else (-1, b"")
