"""This host: the name, and a mark shared by the processes that can see each other."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil


def name() -> str:
    """Return the name of this host, as set by its administrators."""
    return socket.gethostname() or "a host without a name"


def mark() -> str:
    """Return a text that two processes share if process numbers mean the same to both.

    Two containers of a host usually differ in the name, and always in the namespace of process
    numbers.
    """
    found = [name()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        found.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(found)


def has_ended(pid: int) -> bool:
    """Return whether a process of this host has ended; a zombie has ended too."""
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
