"""The lock of a run directory: one run at a time trains there; the run's death frees the directory.

The lock is ``flock`` on the file ``run.lock``. The file stays after the run: removing the file
would let a second run lock a new file while a third run holds the old file. The kernel releases the
lock at the end of the process, whatever the cause. Over NFS, Linux forwards the lock to the server
(as a lock of the whole file, since 2.6.12), so that the lock holds between machines; a machine that
vanishes keeps the lock until the server's lease ends. With the mount option ``local_lock=flock`` or
``nolock`` the lock holds within a machine alone. On a file system without locks, quorate warns and
trains.

Any process that may open the file may lock it. The file's mode therefore admits the users who may
write to the directory, and excludes users who may only read there. An error message names the
process that holds the lock, even if the process is no run.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from quorate.errors import SettingError
from quorate.machine.text import printable
from quorate.services.checkpoints.record import parsed_json

if sys.platform != "win32":
    import fcntl

NAME = "run.lock"

# Seconds for the owner of a lock to write a signature, which happens at once.
OWNER_S = 1.0

MOST_SIGNATURE_BYTES = 4096

NOT_SUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class RunLock:
    """The right of a run to train and write in a run directory.

    Args:
        run_dir: created when the lock is taken; None: there is nothing to lock.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir
        self._descriptor: int | None = None
        self._renewing = threading.Lock()

    @contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock within the block; a nested call on the same object does nothing.

        Args:
            say: shows a line to the user.

        Raises:
            SettingError: another run has the lock, or the directory cannot be made or locked.
        """
        if self._run_dir is None or self._descriptor is not None:
            yield
            return
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            descriptor, lacking = _locked(self._run_dir)
        except OSError as error:
            raise SettingError(
                "run_dir",
                str(self._run_dir),
                "a directory that can be written to",
                f"{error.filename or self._run_dir}: {error.strerror or error}",
            ) from error
        self._keep(descriptor)
        try:
            if lacking is not None:
                say(
                    f"{self._run_dir} cannot be locked ({lacking}), so another run could write "
                    "there; make sure that no other run uses this run_dir"
                )
            yield
        finally:
            self._forget()

    def renew(self, *, make: bool = False) -> None:
        """Take the lock again if the directory was removed, or removed and made again.

        Any thread may call while the lock is held.

        Args:
            make: make the directory again if it is gone.

        Raises:
            OSError: the directory does not exist.
            SettingError: the directory belongs to another run now.
        """
        with self._renewing:
            if self._run_dir is not None and self._descriptor is not None and not self._is_ours():
                self._renew(self._run_dir, make=make)

    def _renew(self, run_dir: Path, *, make: bool) -> None:
        if make:
            run_dir.mkdir(parents=True, exist_ok=True)
        elif not run_dir.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run_dir))
        descriptor, _ = _locked(run_dir)
        self._forget()
        self._keep(descriptor)

    def _is_ours(self) -> bool:
        assert self._run_dir is not None
        assert self._descriptor is not None
        try:
            return _is_still(self._run_dir / NAME, self._descriptor)
        except OSError:  # unknown; a failing write will show the cause
            return True

    def _keep(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _close_in_forks()
        _held.add(self)

    def _forget(self) -> None:
        """Release the lock by closing its only descriptor, see ``_close_in_forks``."""
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is not None:
            os.close(descriptor)


# --- the file -------------------------------------------------------------------------------------


def _locked(run_dir: Path, how: int = os.O_RDONLY) -> tuple[int, str | None]:
    """Return a descriptor with the lock; and the reason if the file system has no locks.

    Args:
        how: the mode in which to open the file. A file system with a file open for writing cannot
            be remounted read-only. NFS requires a file open for writing, and reports EBADF
            otherwise.

    Raises:
        OSError: the file cannot be opened.
        SettingError: another run has the lock.
    """
    path = run_dir / NAME
    while True:
        descriptor = _open(path, how)
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            _close_to_readers(run_dir, descriptor)
            try:
                is_taken, lacking = _lock(descriptor)
            except OSError as error:
                if error.errno != errno.EBADF or how == os.O_RDWR:
                    raise
                return _locked(run_dir, os.O_RDWR)
            if is_taken:
                raise _in_use(run_dir, path, descriptor)
            if _is_still(path, descriptor):  # else the directory was made again meanwhile
                stack.pop_all()
                _sign(path)
                return descriptor, lacking


def _open(path: Path, how: int) -> int:
    # O_NONBLOCK: opening a FIFO would block. Python's descriptors are closed by an exec.
    descriptor = os.open(path, how | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def _close_to_readers(run_dir: Path, descriptor: int) -> None:
    """Deny opening the lock to users who may not write to the directory: old locks have 0644."""
    file, folder = os.fstat(descriptor), run_dir.stat()
    mode = 0o600
    if folder.st_mode & stat.S_IWGRP and folder.st_gid == file.st_gid:
        mode |= 0o060
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        mode |= 0o006
    if stat.S_IMODE(file.st_mode) != mode:
        with suppress(OSError):  # the file belongs to another user, or the file system has no modes
            os.fchmod(descriptor, mode)


def _lock(descriptor: int) -> tuple[bool, str | None]:
    """Lock a file without blocking; return whether another process has the lock, and why it cannot.

    Uses ``flock``, not ``fcntl``: an ``fcntl`` lock belongs to the process, so two trainers of a
    process could both hold the lock, and closing any descriptor of the file would release the lock.
    """
    if sys.platform == "win32":
        return False, "this system has no flock"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True, None
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            return False, error.strerror or str(error)
        raise
    return False, None


def _is_still(path: Path, descriptor: int) -> bool:
    """Return whether a path still names an open file, and not a replacement."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _sign(path: Path) -> None:
    """Write the owner into the lock, for messages of other runs. Not possible on a full disk."""
    signature = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            os.write(descriptor, (json.dumps(signature) + "\n").encode())
        finally:
            os.close(descriptor)


def _in_use(run_dir: Path, path: Path, descriptor: int) -> SettingError:
    """Return the error that names the holder of a lock."""
    deadline = time.monotonic() + OWNER_S
    while (owner := _owner(path)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    holders = _holders(descriptor)
    if holders and (owner is None or owner.pid not in holders):
        # A signature of a process that does not hold the lock: the holder is no run, or could not
        # write its signature.
        named = " and ".join(_process(pid) for pid in holders)
        fix = f"{named} has {path} locked; wait for its end, stop it, or choose another run_dir"
    else:
        named = "another run" if owner is None else owner.words
        fix = f"{named} does; wait for its end, stop it, or choose another run_dir"
    return SettingError("run_dir", str(run_dir), "a directory that no other run trains in", fix)


def _holders(descriptor: int) -> list[int]:
    """Return the processes of this host that hold a lock on a file, as far as Linux reveals them.

    A line of /proc/locks: ``1: FLOCK  ADVISORY  WRITE 4711 fd:00:131092 0 EOF``.
    """
    file, holders = os.fstat(descriptor), []
    with suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            words = line.split()
            if len(words) != 8 or words[1] != "FLOCK":
                continue
            major, minor, inode = words[5].split(":")
            device = os.makedev(int(major, 16), int(minor, 16))
            if (device, int(inode)) == (file.st_dev, file.st_ino):
                holders.append(int(words[4]))
    return holders


def _process(pid: int) -> str:
    """Return ``process 4711 (flock, of user ann)``: the known facts about a local process."""
    known = []
    with suppress(psutil.Error, OSError):
        known = [printable(psutil.Process(pid).name(), 40)]
        known.append(f"of user {printable(psutil.Process(pid).username(), 40)}")
    return f"process {pid}" + (f" ({', '.join(known)})" if known else "")


class _LockOwner(NamedTuple):
    """A run that signed a lock as its owner."""

    pid: int
    words: str


def _owner(path: Path) -> _LockOwner | None:
    """Return the owner named in a lock's signature; None without one, or if the owner is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            signature = parsed_json(os.read(descriptor, MOST_SIGNATURE_BYTES))
        finally:
            os.close(descriptor)
        pid, host, since = (signature[name] for name in ("pid", "host", "since"))
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
        if not isinstance(pid, int) or pid <= 0:
            return None
        if pid == os.getpid() and host == socket.gethostname():
            return _LockOwner(pid, f"another Trainer of this process (pid {pid}, since {when})")
        if host == socket.gethostname():
            with suppress(PermissionError):  # another user's process, which therefore exists
                os.kill(pid, 0)  # raises for a signature left by an earlier run
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return _LockOwner(pid, f"process {pid} on {printable(host)} (since {when})")


# --- forks ----------------------------------------------------------------------------------------

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()
_forks_are_told = False


def _close_in_forks() -> None:
    """Make every fork of this process close its copies: a lock is held while any copy is open.

    Loader processes of towers are forks, and may outlive a killed coordinator. Processes started by
    an exec (workers, the fork server) never inherit a copy.
    """
    global _forks_are_told
    if not _forks_are_told and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)
        _forks_are_told = True


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()
