"""The name of this host: equal for two processes that are on one machine and see each other."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path


def host_identity() -> str:
    """Return what only processes of this host have: containers of one machine are several."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    for namespace in ("net", "pid"):
        with suppress(OSError):
            parts.append(str(Path(f"/proc/self/ns/{namespace}").readlink()))
    return " ".join(parts)
