"""What a run directory holds: seen, or said why not; tried for writing; moved aside.

What cannot be seen may be there all the same, on a disk that is not mounted: nothing is begun anew
in its place.
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

# What of a run directory is ours, and of which kind it is.
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

# There is no room now, and may be later: training does not depend on it.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# What a kill in the middle of ``write_atomically`` left, or in the middle of a try for writing.
LEFT_BY_A_KILL = re.compile(r"\.quorate-\w+")


def require_seen(run_dir: Path) -> None:
    """Look whether a run directory and its checkpoints can be read, if they are there.

    Raises:
        SettingError: a link leads nowhere, something else is in their place, or they cannot be
            read.
    """
    if _is_there(run_dir, run_dir, "a directory"):
        folder = run_dir / "checkpoints"
        if _is_there(run_dir, folder, "a directory"):
            try:
                with os.scandir(folder) as entries:  # its names, and ...
                    next(entries, None)
                os.stat(f"{folder}/.")  # noqa: PTH116  ... what they name
            except OSError as error:
                raise _refused(run_dir, folder, error.strerror or str(error)) from error


def require_usable(run_dir: Path, say: Callable[[str], None]) -> None:
    """Look whether a run directory, which is there and locked, can be trained in.

    Args:
        run_dir: what a kill left of files that were being written is removed from it.
        say: is told that a disk is full.

    Raises:
        SettingError: as ``require_seen``; or the directory cannot be written to, or there is
            something else in the place of a log.
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
        if not folder.is_symlink() and folder.is_dir():  # a link's target may be others' too
            _remove_left(folder)


def _is_there(run_dir: Path, path: Path, expected: str) -> bool:
    """Whether there is something, which then is of a kind.

    Raises:
        SettingError: nobody can tell, or it is of another kind.
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
    """Move what an earlier run left into a folder of its own there; None if there is nothing.

    A link is moved as it is, wherever it leads.

    Raises:
        SettingError: it cannot be moved.
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
    """Move the logs of a run aside that has no checkpoint: one begins that would cut them.

    The checkpoints may be on a disk that is not mounted where they are expected.

    Raises:
        SettingError: they cannot be moved.
    """
    log = run_dir / "metrics.jsonl"
    if log.exists() and log.stat().st_size and (folder := set_aside(run_dir, LOGS)) is not None:
        say(
            f"{run_dir} has the logs of a run without a checkpoint; moved the logs to {folder}, "
            "and training begins at step 0"
        )
