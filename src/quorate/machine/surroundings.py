"""What a process needs around it: folders, standard descriptors, a system on which it may fork."""

from __future__ import annotations

import os
import sys
import tempfile

from quorate.errors import UserError
from quorate.machine.standard_streams import occupy_standard_descriptors


def require_surroundings() -> None:
    """Refuse a process that has no folder to be in, or none for temporary files.

    Descriptors 0, 1 and 2 that are closed are opened, before anything else gets their numbers.

    Raises:
        UserError: something is missing.
    """
    require_current_folder()
    require_temporary_folder()
    occupy_standard_descriptors()


def require_current_folder() -> None:
    """Refuse a current folder that is not there any more.

    torch's libraries do not load their kernels in such a place, and end the process with a message
    about something else.

    Raises:
        UserError: it was deleted.
    """
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        raise UserError(
            "the current folder",
            got="a deleted folder",
            expected="an existing folder, which torch needs to compute",
            fix="cd to another folder, or cd .. and back if the folder was made again",
        ) from None


def require_temporary_folder() -> None:
    """Refuse a machine on which no temporary file can be written: torch needs some.

    Raises:
        UserError: there is no folder for it.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(
            "the temporary folder",
            error.strerror,
            fix="set TMPDIR to a folder that can be written to, on a disk with room, and see "
            "that files may have a size (ulimit -f)",
        ) from None


def can_fork() -> bool:
    """Return whether this system has what a server of forks needs; some sandboxes lack it."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
