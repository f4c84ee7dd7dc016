"""The surroundings of a process: folders, standard descriptors, a system that allows forks."""

from __future__ import annotations

import os
import sys
import tempfile

from quorate.errors import UserError
from quorate.machine.standard_streams import occupy_standard_descriptors


def require_surroundings() -> None:
    """Refuse a process without a current folder or a folder for temporary files.

    Closed descriptors 0, 1 and 2 are opened, before other files can get their numbers.

    Raises:
        UserError: a folder is missing.
    """
    require_current_folder()
    require_temporary_folder()
    occupy_standard_descriptors()


def require_current_folder() -> None:
    """Refuse a deleted current folder.

    In such a folder, torch's libraries fail to load their kernels, and end the process with a
    misleading message.

    Raises:
        UserError: the folder was deleted.
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
    """Refuse a machine without a writable folder for temporary files, which torch needs.

    Raises:
        UserError: there is no such folder.
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
    """Return whether this system supports a server of forks; some sandboxes do not."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
