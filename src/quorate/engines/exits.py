"""Ends of the program that user code asks for where a shard is computed: errors, not ends."""

from __future__ import annotations

from quorate.errors import ExitError, cut


def exited(error: SystemExit, where: str) -> ExitError:
    """Return the error that an end of the program is, where a shard is computed.

    Args:
        where: which shard that was, and whose.
    """
    code = error.code if isinstance(error.code, int) and error.code % 256 else 1
    given = "" if error.code is None else cut(repr(error.code))
    return ExitError(
        f"sys.exit({given}) was called by the code that computes a shard, in {where}",
        code,
        fix="raise an exception there, or call stop() of the trainer in a callback",
    )
