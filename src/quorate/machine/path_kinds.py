"""What a path that a user typed leads to: a file, a folder, or nothing that can be reached.

``Path.is_file`` and its kin raise for a name of more than 255 characters, for a folder that may not
be searched, and for a disk that does not answer. The functions here return False for these paths,
so that the check of a setting refuses the path in its own words.
"""

from __future__ import annotations

import os
from pathlib import Path


def is_file(path: str | Path) -> bool:
    """Return whether a path leads to a regular file that can be reached."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Return whether a path leads to a folder that can be reached."""
    return os.path.isdir(path)  # noqa: PTH112


def exists(path: str | Path) -> bool:
    """Return whether a path leads to anything that can be reached."""
    return os.path.exists(path)  # noqa: PTH110


def reason_against_new_file(path: Path) -> str | None:
    """Return why no file of this path can be made: its name is too long, say; None: it may be."""
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None
