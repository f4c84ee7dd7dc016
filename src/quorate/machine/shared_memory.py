"""Shared memory: segments without a name, which other processes map by their descriptor.

Nobody but the processes that were handed a descriptor can open a segment, and it is gone with the
last of them, however they ended: there is nothing to clean up after a kill -9. On Linux a segment
is a memfd, which counts as memory and is not bounded by the size of /dev/shm.
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

_MAP_FIXED = 0x10  # of Linux's mman.h: Python does not have it


class Segment:
    """Zeroed memory, mapped here, that other processes can map too.

    Pages are taken from the machine when they are first written.

    Args:
        nbytes: its size, at least 1.
        fd: the descriptor of a segment that another process made; this object owns it from now on.

    Raises:
        UserError: the machine does not give so much memory.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        try:
            self.fd = _anonymous(nbytes) if fd is None else fd
            weakref.finalize(self, os.close, self.fd)
            # Tensors hold on to the map, and the object need not outlive them to keep it mapped.
            self.map = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            cure = "use fewer workers or shards, or engine='towers'"
            if error.errno == errno.EFBIG:  # it counts as a file
                cure = "raise the limit on the size of files: ulimit -f unlimited, or " + cure
            size = f"{nbytes:,} bytes" if nbytes < MIB else f"{nbytes / MIB:,.0f} MiB"
            raise UserError(
                "shared memory",
                f"{size} cannot be had ({error.strerror})",
                fix=cure,
            ) from error
        self.nbytes = nbytes

    def become(self, other: Segment) -> None:
        """Have what is mapped here be another segment of this size, at the address that it has.

        So tensors in it are the other's from now on. What was here is given back, and nobody may
        touch it any more: neither another thread meanwhile, nor a process that has it mapped. On
        Linux alone.

        Raises:
            UserError: the machine does not map it.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        access = mmap.PROT_READ | mmap.PROT_WRITE
        # Over what is there: the map and all tensors go on to point to it, as aligned as before.
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(address, self.nbytes, access, flags, other.fd, 0) != address:
            why = os.strerror(ctypes.get_errno())
            raise UserError(
                "shared memory", f"another segment cannot be mapped at this address ({why})"
            )
        os.ftruncate(self.fd, 0)  # the map has a descriptor of its own, which would keep it
        os.dup2(other.fd, self.fd, inheritable=False)

    def tensor(self, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
        """Return the (count,) elements from byte ``start`` on, a multiple of an element's size."""
        import torch  # here, as the doctor looks at segments where torch cannot be imported

        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=start)

    def array(self, nbytes: int, start: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the bytes from byte ``start`` on: they are no copy."""
        import numpy as np

        return np.frombuffer(self.map, np.uint8, nbytes, start)


def require(nbytes: int, purpose: str, fix: str) -> None:
    """Compare what will be needed with what is free.

    Raises:
        UserError: there is not enough; it names both figures.
    """
    free = free_bytes()
    if free is not None and nbytes > free:
        raise UserError(
            "shared memory",
            f"{purpose} need {nbytes / MIB:,.0f} MiB, and {free / MIB:,.0f} MiB are free",
            fix=fix,
        )


def free_bytes() -> int | None:
    """Return what segments may still take of machine and container; None if that is unknown."""
    if not hasattr(os, "memfd_create"):
        return shutil.disk_usage(tempfile.gettempdir()).free
    found = [_available(Path("/proc/meminfo")), memory_left()]
    return min((free for free in found if free is not None), default=None)


def _anonymous(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quorate", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
    else:
        with tempfile.TemporaryFile() as file:  # has no name, or loses it at once
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
