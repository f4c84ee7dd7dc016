"""Shared memory: segments without a name, mapped by processes that receive the descriptor.

Only processes that received the descriptor can open a segment. The kernel frees the segment with
the last of these processes, however they end: a kill -9 leaves nothing to clean up. On Linux a
segment is a memfd, which counts as memory and is not bounded by the size of /dev/shm.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from quorate.errors import UserError
from quorate.machine.resources import memory_left

if TYPE_CHECKING:
    import numpy as np
    import torch

MIB = 1 << 20

_MAP_FIXED = 0x10  # from Linux's mman.h: Python lacks the constant


class Segment:
    """Zeroed memory mapped into this process, for sharing with more processes.

    The machine provides each page at the first write.

    Args:
        nbytes: size in bytes, at least 1.
        fd: the descriptor of a segment made by another process; this object owns it from now on.

    Raises:
        UserError: the machine lacks so much memory.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        try:
            self.fd = _anonymous(nbytes) if fd is None else fd
            weakref.finalize(self, os.close, self.fd)
            # Tensors keep the map alive, so this object may be collected before its tensors.
            self.map = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            cure = "use fewer workers or shards, or engine='towers'"
            if error.errno == errno.EFBIG:  # the limit on file sizes applies to a memfd
                cure = "raise the limit on the size of files: ulimit -f unlimited, or " + cure
            size = f"{nbytes:,} bytes" if nbytes < MIB else f"{nbytes / MIB:,.0f} MiB"
            raise UserError(
                "shared memory",
                f"{size} cannot be had ({error.strerror})",
                fix=cure,
            ) from error
        self.nbytes = nbytes

    def become(self, other: Segment) -> None:
        """Replace the mapped memory by another segment of equal size, at the same address.

        All tensors in this segment show the other segment's memory from now on. The old memory is
        freed, and must not be accessed any more: neither by another thread during the call, nor by
        a process with its own map of the old segment. Linux only.

        Raises:
            UserError: the machine cannot map the other segment.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        access = mmap.PROT_READ | mmap.PROT_WRITE
        # Map over the old segment: the map object and all tensors keep their address and alignment.
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(address, self.nbytes, access, flags, other.fd, 0) != address:
            why = os.strerror(ctypes.get_errno())
            raise UserError(
                "shared memory", f"another segment cannot be mapped at this address ({why})"
            )
        os.ftruncate(self.fd, 0)  # the map object's own descriptor would keep the memory
        os.dup2(other.fd, self.fd, inheritable=False)

    def tensor(self, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
        """Return the (count,) elements from byte ``start`` on, a multiple of an element's size."""
        import torch  # here, as the doctor looks at segments where torch cannot be imported

        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=start)

    def array(self, nbytes: int, start: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the bytes from byte ``start`` on, without a copy."""
        import numpy as np

        return np.frombuffer(self.map, np.uint8, nbytes, start)


def require(nbytes: int, purpose: str, fix: str) -> None:
    """Check that the free memory suffices.

    Raises:
        UserError: there is not enough memory; the error has both figures.
    """
    free = free_bytes()
    if free is not None and nbytes > free:
        raise UserError(
            "shared memory",
            f"{purpose} need {nbytes / MIB:,.0f} MiB, and {free / MIB:,.0f} MiB are free",
            fix=fix,
        )


def free_bytes() -> int | None:
    """Return the bytes available for segments in machine and container; None if unknown."""
    if not hasattr(os, "memfd_create"):
        return shutil.disk_usage(tempfile.gettempdir()).free
    found = [_available(Path("/proc/meminfo")), memory_left()]
    return min((free for free in found if free is not None), default=None)


def _anonymous(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quorate", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
    else:
        with tempfile.TemporaryFile() as file:  # the file has no name, or loses its name at once
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
        kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(kib) * 1024
