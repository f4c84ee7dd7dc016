"""The lock of a run directory: one run trains in it at a time, and its death ends that.

It is ``flock`` on the file ``run.lock``, which stays when the run is over: removing it would let a
second run lock a new file while a third holds the old one. The kernel releases the lock when the
process is gone, whatever it died of. Over NFS, Linux asks the server for it (a lock of the whole
file, since 2.6.12), so that it holds between machines; a machine that vanishes keeps it until the
server's lease is over. With the mount option ``local_lock=flock`` or ``nolock`` it holds within a
machine alone. File systems without locks are said, and trained on.

Whoever may open the file may lock it: the file is open to those who may write to the directory, and
to nobody who may read there alone. A process that has the lock and is no run is named all the same.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from quorate.errors import SettingError
from quorate.machine.text import printable
from quorate.services.checkpoints.record import parsed_json

if sys.platform != "win32":
    import fcntl

NAME = "run.lock"

# How long the owner of a lock may take to write who it is; it does so at once.
OWNER_S = 1.0

MOST_SIGNATURE_BYTES = 4096

NOT_SUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class RunLock:
    """The right to train in a run directory, and to write there.

    Args:
        run_dir: made when it is locked; None: nothing is to be locked.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir
        self._descriptor: int | None = None
        self._renewing = threading.Lock()

    @contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[None]:
        """Within the block no other run can have it; again by the same one is no matter.

        Args:
            say: shows a line to the user.

        Raises:
            SettingError: another run has it, or the directory cannot be made or locked.
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
        """Hold on to what has the directory's name now: it may have been removed, and made again.

        Any thread may call it while the lock is held.

        Args:
            make: make the directory again where it is gone.

        Raises:
            OSError: the directory is not there.
            SettingError: it is another run's now.
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
        except OSError:  # nobody can tell; what is to be written will show
            return True

    def _keep(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _close_in_forks()
        _held.add(self)

    def _forget(self) -> None:
        """Release it: no other descriptor shares it, see ``_close_in_forks``."""
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is not None:
            os.close(descriptor)


# --- the file -------------------------------------------------------------------------------------


def _locked(run_dir: Path) -> tuple[int, str | None]:
    """Return a descriptor that has the lock; and, if there can be none here, why.

    Raises:
        OSError: the file cannot be opened.
        SettingError: another run has the lock.
    """
    path = run_dir / NAME
    while True:
        # For reading: a file system with a file open for writing cannot be remounted read-only.
        # NFS wants it open for writing, and says so by EBADF.
        for how in (os.O_RDONLY, os.O_RDWR):
            descriptor = _open(path, how)
            try:
                _close_to_readers(run_dir, descriptor)
                is_taken, lacking = _lock(descriptor)
                if is_taken:
                    raise _in_use(run_dir, path, descriptor)
                is_there = _is_still(path, descriptor)
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.EBADF or how == os.O_RDWR:
                    raise
            except BaseException:
                os.close(descriptor)
                raise
            else:
                break
        if is_there:
            _sign(path)
            return descriptor, lacking
        os.close(descriptor)  # the directory was removed, and made again, in between


def _open(path: Path, how: int) -> int:
    # O_NONBLOCK: a FIFO would wait for somebody. An exec closes what Python opens.
    descriptor = os.open(path, how | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def _close_to_readers(run_dir: Path, descriptor: int) -> None:
    """Let nobody open the lock who may not write to the directory: it was 0644 once."""
    file, folder = os.fstat(descriptor), run_dir.stat()
    mode = 0o600
    if folder.st_mode & stat.S_IWGRP and folder.st_gid == file.st_gid:
        mode |= 0o060
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        mode |= 0o006
    if stat.S_IMODE(file.st_mode) != mode:
        with suppress(OSError):  # another user's, or a file system without modes
            os.fchmod(descriptor, mode)


def _lock(descriptor: int) -> tuple[bool, str | None]:
    """Lock a file; return whether another has it, and why it cannot be locked. Does not block.

    With ``flock``, and not with ``fcntl``: that would be the process's, so that two trainers of one
    process could both have it, and whoever closes another descriptor of the file would release it.
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
    """Whether a file has this name, and not one that replaced it."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _sign(path: Path) -> None:
    """Write whose it is, for others' messages. On a full disk it is a lock without a name."""
    signature = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            os.write(descriptor, (json.dumps(signature) + "\n").encode())
        finally:
            os.close(descriptor)


def _in_use(run_dir: Path, path: Path, descriptor: int) -> SettingError:
    """Return the error that names who has a lock."""
    deadline = time.monotonic() + OWNER_S
    while (owner := _owner(path)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    holders = _holders(descriptor)
    if holders and (owner is None or owner.pid not in holders):
        # Whoever signed is a run, and is not who has it: a process that is none, or the signature
        # could not be written.
        named = " and ".join(_process(pid) for pid in holders)
        fix = f"{named} has {path} locked; wait for its end, stop it, or choose another run_dir"
    else:
        named = "another run" if owner is None else owner.words
        fix = f"{named} does; wait for its end, stop it, or choose another run_dir"
    return SettingError("run_dir", str(run_dir), "a directory that no other run trains in", fix)


def _holders(descriptor: int) -> list[int]:
    """Return the processes of this host that have a file locked, as far as Linux tells.

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
    """``process 4711 (flock, of user ann)``: as much as is known of a process of this host."""
    known = []
    with suppress(psutil.Error, OSError):
        known = [printable(psutil.Process(pid).name(), 40)]
        known.append(f"of user {printable(psutil.Process(pid).username(), 40)}")
    return f"process {pid}" + (f" ({', '.join(known)})" if known else "")


class _Owner(NamedTuple):
    """A run that says that a lock is its own."""

    pid: int
    words: str


def _owner(path: Path) -> _Owner | None:
    """Return who says that a lock is his; None if nobody says it, or somebody who is gone."""
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
            return _Owner(pid, f"another Trainer of this process (pid {pid}, since {when})")
        if host == socket.gethostname():
            with suppress(PermissionError):  # another user's process: it is there
                os.kill(pid, 0)  # raises: it is what an earlier run left
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return _Owner(pid, f"process {pid} on {printable(host)} (since {when})")


# --- forks ----------------------------------------------------------------------------------------

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()
_forks_are_told = False


def _close_in_forks() -> None:
    """Have every fork of this process close its copies: a lock is held as long as one is open.

    Loader processes of towers are forks, and may outlive a coordinator that is killed. What is
    started by an exec (workers, the fork server) has none in any case.
    """
    global _forks_are_told
    if not _forks_are_told and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)
        _forks_are_told = True


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()
