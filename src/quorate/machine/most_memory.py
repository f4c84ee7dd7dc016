"""The most memory that a program can have: what is larger need not be begun to be read."""

from __future__ import annotations

from contextlib import suppress

from quorate.machine import container


def most_memory() -> int | None:
    """Return bytes that can be had now; None where the system does not say.

    What a container has used so far is not taken off: most of it may be files that were read, which
    make room.
    """
    import psutil  # not by those who only look at a run

    found = [container.memory_limit()]
    # Where /proc is not there, or has another form, the system does not say.
    with suppress(OSError, ValueError, LookupError, NotImplementedError, RuntimeError):
        found.append(psutil.virtual_memory().available)
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def too_large(nbytes: int) -> str:
    """Return why so many bytes cannot be read into memory, or an empty text."""
    most = most_memory()
    if most is None or nbytes <= most:
        return ""
    return f"{nbytes:,} bytes, and {most:,} bytes of memory can be had"
