"""This host: its name, and a mark that those processes have in common which see each other."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil


def name() -> str:
    """Return the name of this host, as its administrators know it."""
    return socket.gethostname() or "a host without a name"


def mark() -> str:
    """Return what two processes share if the number of one is that of the same one to the other.

    Two containers of a host have another name mostly, and other numbers for processes always.
    """
    found = [name()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        found.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(found)


def has_ended(pid: int) -> bool:
    """Return whether there is no such process any more on this host, or what is left of one."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError):
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped: by Ctrl-Z, a debugger, SIGSTOP."""
    try:
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return pid != os.getpid() and psutil.Process(pid).status() in stopped
    except (psutil.Error, OSError):
        return False
