"""The content of a run directory: checks of reading and writing, and moving a run aside.

Data that cannot be seen may exist all the same, on a disk that is not mounted: quorate never starts
a new run in their place.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from quorate.errors import SettingError
from quorate.machine.text import printable

# The names of a run directory that belong to quorate, and their kinds.
LOGS = (
    *("metrics.jsonl", "events.jsonl", "summaries", "display.txt", "status.json"),
    *("wandb.id", "mlflow.id"),
)
OURS = ("checkpoints", *LOGS)
FOLDERS = ("checkpoints", "summaries")

KINDS: dict[str, Callable[[int], bool]] = {
    "a directory": stat.S_ISDIR,
    "a file": stat.S_ISREG,
    "a FIFO": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}

# Errors of a full disk, which may have room later: training does not depend on saving.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Leftovers of a kill during ``write_atomically``, or during a test of writing.
LEFT_BY_A_KILL = re.compile(r"\.quorate-\w+")


def require_seen(run_dir: Path) -> None:
    """Check that a run directory and its checkpoints, if they exist, can be read.

    Raises:
        SettingError: a link is dangling, something else is in their place, or they cannot be read.
    """
    if _is_there(run_dir, run_dir, "a directory"):
        folder = run_dir / "checkpoints"
        if _is_there(run_dir, folder, "a directory"):
            try:
                with os.scandir(folder) as entries:  # the folder's names are readable, and ...
                    next(entries, None)
                os.stat(f"{folder}/.")  # noqa: PTH116  ... its entries
            except OSError as error:
                raise _refused(run_dir, folder, error.strerror or str(error)) from error


def require_usable(run_dir: Path, say: Callable[[str], None]) -> None:
    """Check that an existing, locked run directory can be used for training.

    Args:
        run_dir: the run directory; leftovers of files being written during a kill are removed.
        say: receives a message if a disk is full.

    Raises:
        SettingError: as ``require_seen``; or the directory is not writable, or something else is in
            the place of a log.
    """
    require_seen(run_dir)
    there = {
        name: _is_there(run_dir, run_dir / name, "a directory" if name in FOLDERS else "a file")
        for name in OURS
    }
    tried = [run_dir, *(run_dir / name for name in ("checkpoints",) if there[name])]
    for folder in tried:
        try:
            Path(tempfile.mkdtemp(prefix=".quorate-", dir=folder)).rmdir()
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno not in NO_ROOM:
                raise _refused(run_dir, folder, f"it cannot be written to: {reason}") from error
            say(f"{folder}: {reason}; training begins, and nothing is saved until there is room")
    for folder in (run_dir, *(run_dir / name for name in FOLDERS)):
        if not folder.is_symlink() and folder.is_dir():  # a link's target may be shared
            _remove_left(folder)


def _is_there(run_dir: Path, path: Path, expected: str) -> bool:
    """Return whether a path exists, with the expected kind.

    Raises:
        SettingError: the path cannot be examined, or is of another kind.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.is_symlink():
            return False
        target = printable(os.readlink(path))  # noqa: PTH115
        raise _refused(
            run_dir, path, f"a link to {target}, which is not there: is a disk not mounted?"
        ) from None
    except OSError as error:
        raise _refused(run_dir, path, error.strerror or str(error)) from error
    if not KINDS[expected](mode):
        kind = next((name for name, is_kind in KINDS.items() if is_kind(mode)), "something else")
        raise _refused(run_dir, path, f"{kind}, and not {expected}")
    return True


def _refused(run_dir: Path, path: Path, reason: str) -> SettingError:
    fix = "fix that, or choose another run_dir"
    if path != run_dir:
        fix = "fix that, choose another run_dir, or start again with --fresh, which moves it aside"
    return SettingError(
        "run_dir",
        str(run_dir),
        "a directory that can be read and written",
        f"{path}: {reason}; {fix}",
    )


def _remove_left(folder: Path) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if LEFT_BY_A_KILL.fullmatch(entry.name):
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        os.rmdir(entry.path)  # noqa: PTH106
                    else:
                        os.unlink(entry.path)  # noqa: PTH108


def set_aside(run_dir: Path, names: Sequence[str] = OURS) -> Path | None:
    """Move an earlier run into a new subfolder of the run directory; None if there is no run.

    A link is moved itself, not its target.

    Raises:
        SettingError: the run cannot be moved.
    """
    there = [path for name in names if os.path.lexists(path := run_dir / name)]
    if not there:
        return None
    number = 1
    while os.path.lexists(folder := run_dir / f"aside-{number}"):
        number += 1
    path = folder
    try:
        folder.mkdir()
        for path in there:
            path.rename(folder / path.name)
    except OSError as error:
        reason = f"it cannot be moved to {folder}: {error.strerror or error}"
        raise SettingError(
            "run_dir",
            str(run_dir),
            "a directory whose run can be moved aside",
            f"{path}: {reason}; fix that, or choose another run_dir",
        ) from error
    return folder


def set_log_aside(run_dir: Path, say: Callable[[str], None]) -> None:
    """Move the logs of a run without a checkpoint aside: a new run would truncate them.

    The missing checkpoints may be on a disk that is not mounted now.

    Raises:
        SettingError: the logs cannot be moved.
    """
    log = run_dir / "metrics.jsonl"
    if log.exists() and log.stat().st_size and (folder := set_aside(run_dir, LOGS)) is not None:
        say(
            f"{run_dir} has the logs of a run without a checkpoint; moved the logs to {folder}, "
            "and training begins at step 0"
        )
