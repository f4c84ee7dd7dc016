"""The lock of a run directory: one run trains in it at a time, and its death ends that.

It is ``flock`` on the file ``run.lock``, which stays when the run is over: removing it would let a
second run lock a new file while a third holds the old one. The kernel releases the lock when the
process is gone, whatever it died of. Over NFS, Linux asks the server for it (a lock of the whole
file, since 2.6.12), so that it holds between machines; a machine that vanishes keeps it until the
server's lease is over. With the mount option ``local_lock=flock`` or ``nolock`` it holds within a
machine alone. File systems without locks are said, and trained on.
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

from quorate.errors import SettingError
from quorate.machine.printable import printable

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
                    f"{self._run_dir} cannot be locked ({lacking}): nothing keeps another run out, "
                    "so see to it that there is none"
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
                is_taken, lacking = _lock(descriptor)
                if is_taken:
                    raise _in_use(run_dir, path)
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
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def _lock(descriptor: int) -> tuple[bool, str | None]:
    """Lock a file; return whether another has it, and why it cannot be locked. Does not block.

    With ``flock``, and not with ``fcntl``: that would be the process's, so that two trainers of one
    process could both have it, and whoever closes another descriptor of the file would release it.
    """
    if sys.platform == "win32":
        return False, "there is no flock on this system"
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


def _in_use(run_dir: Path, path: Path) -> SettingError:
    """Return the error that names who has a lock."""
    deadline = time.monotonic() + OWNER_S
    while (owner := _owner(path)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return SettingError(
        "run_dir",
        str(run_dir),
        "a directory that no other run trains in",
        f"{owner or 'another run'} does; wait for its end, stop it, or choose another run_dir",
    )


def _owner(path: Path) -> str | None:
    """Return who says that a lock is his; None if nobody says it, or somebody who is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            signature = json.loads(os.read(descriptor, MOST_SIGNATURE_BYTES))
        finally:
            os.close(descriptor)
        pid, host, since = (signature[name] for name in ("pid", "host", "since"))
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
        if not isinstance(pid, int) or pid <= 0:
            return None
        if pid == os.getpid() and host == socket.gethostname():
            return f"another Trainer of this process (pid {pid}, since {when})"
        if host == socket.gethostname():
            os.kill(pid, 0)  # raises: it is what an earlier run left
    except PermissionError:  # another user's process; or a file that is not ours to read
        pass
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return f"process {pid} on {printable(host)} (since {when})"


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
