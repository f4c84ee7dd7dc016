"""The temporary folder: whether the sockets of loader processes fit into it."""

from __future__ import annotations

import os
import tempfile

from quorate.errors import SettingError

# Python names the sockets of loader processes TMPDIR/pymp-12345678/listener-12345678, and the
# kernel takes 107 bytes of a name.
SOCKET_NAME = 32
LONGEST_TEMPORARY = 107 - SOCKET_NAME


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
