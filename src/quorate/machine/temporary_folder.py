"""The temporary folder: whether there is one, and sockets of loader processes fit into it."""

from __future__ import annotations

import os
import tempfile

from quorate.errors import SettingError, UserError

# Python names the sockets of loader processes TMPDIR/pymp-12345678/listener-12345678, and the
# kernel takes 107 bytes of a name.
SOCKET_NAME = 32
LONGEST_TEMPORARY = 107 - SOCKET_NAME


def require_temporary_folder() -> None:
    """Refuse a machine on which no temporary file can be written: torch needs some.

    Raises:
        UserError: there is no folder for it.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(
            f"the temporary folder: {error.strerror}; set TMPDIR to a folder that can be written "
            "to, on a disk with room, and see that files may have a size (ulimit -f)"
        ) from None


def require_short_path() -> None:
    """Refuse a temporary folder whose path is too long for the name of a socket.

    Raises:
        SettingError: it is.
    """
    folder = tempfile.gettempdir()
    long = len(os.fsencode(folder))
    if long > LONGEST_TEMPORARY:
        raise SettingError(
            "the temporary folder",
            folder,
            f"a path of at most {LONGEST_TEMPORARY} bytes (it has {long}): loader_workers have"
            " their sockets there",
            "set TMPDIR to a shorter one, or loader_workers=0",
        )
