"""The limits of a process: shared memory, descriptors, a temporary folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable

from quorate.commands.doctor.facts import ProcessLimits
from quorate.errors import UserError
from quorate.machine import descriptors
from quorate.machine.shared_memory import MIB, Segment

# The size of the test segment: room for a model of some million parameters.
TRIED_BYTES = 64 * MIB


def limits() -> ProcessLimits:
    """Return the limits. Creates a segment and a temporary file as tests, and removes both."""
    files = descriptors.limit()
    folder, error = _temporary()
    return ProcessLimits(
        segment_error=_refusal(lambda: Segment(TRIED_BYTES)),
        files=files[0],
        files_most=files[1],
        file_bytes=_limit("RLIMIT_FSIZE"),
        address_bytes=_limit("RLIMIT_AS"),
        temporary=folder,
        temporary_error=error,
        temporary_free_bytes=None if error else shutil.disk_usage(folder).free,
    )


def _limit(name: str) -> int | None:
    """Return the soft limit; None: no limit, or not on this system."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft in (resource.RLIM_INFINITY, -1) else soft


def _temporary() -> tuple[str, str | None]:
    """Return the temporary folder, and why the folder is not writable."""
    folder = "?"
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile() as file:
            file.write(b"quorate")
            file.flush()
    except OSError as error:
        return folder, error.strerror or str(error)
    return folder, None


def _refusal(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except UserError as error:
        return str(error)
    return None
