"""A process that has imported what every run imports, and is forked for each: 6 s of a core less.

Run as a program, this file is that process. A run in a fork of it differs from one of a new
interpreter in nothing that quorate looks at: it is the command's ``main``, with its own arguments,
environment, folder and output, and its workers are processes as ever. Its first fork server is
forked too. Runs that are started by ``subprocess`` have all of it from nothing.

The kernel keeps the environment that a process was started with: that of a fork is the one of this
process. A run that is to be found by a mark in it has a page of memory named after the mark, which
its forks have too.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import mmap
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from quorate.machine.dies_with_parent import JOB_SIGNALS, die_with
from quorate.transports.processes.wire import Wire


class Warm:
    """The side of the tests. Any thread may call ``run``, each at its own time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._popen: subprocess.Popen[bytes] | None = None

    def run(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        module: str = "quorate",
    ) -> tuple[int, str, str]:
        """Run the command ``quorate``, or another module, to its end: exit code, output, errors.

        Raises:
            subprocess.TimeoutExpired: it was killed for that.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            report = self._begun(module, arguments, env, [out.fileno(), err.fileno()])
            report.socket.settimeout(timeout_s)
            pid = 0
            try:
                started, ended = report.receive(), None
                assert started is not None
                pid = started["pid"]
                ended = report.receive()
            except TimeoutError:
                if pid:  # 0 would be this process's own group
                    os.kill(pid, signal.SIGKILL)
                late = subprocess.TimeoutExpired(list(arguments), timeout_s)
                late.add_note(f"it had said:\n{_text(out)}{_text(err)}")
                raise late from None
            finally:
                report.close()
            assert ended is not None
            return os.waitstatus_to_exitcode(ended["status"]), _text(out), _text(err)

    def start(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        mark: str = "",
        module: str = "quorate",
    ) -> Forked:
        """Start the command ``quorate``, or another module. Its errors are output.

        Args:
            arguments: of the command.
            env: all of its environment.
            mark: names its page of memory, see above. With one it leads a process group too.
        """
        ours, theirs = os.pipe()
        report = self._begun(module, arguments, env, [theirs, theirs], mark)
        os.close(theirs)
        started = report.receive()
        assert started is not None
        return Forked(started["pid"], report, ours)

    def _begun(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        fds: list[int],
        mark: str = "",
    ) -> Wire:
        """Have a run begin; return where its pid is told, and how it ends."""
        report, theirs = Wire.pair()
        message = {
            **{"arguments": [module, *arguments], "env": dict(env), "folder": str(Path.cwd())},
            "mark": mark,
        }
        with self._lock:
            if self._wire is None:
                self._start()
            assert self._wire is not None
            self._wire.send(message, [theirs.socket.fileno(), *fds])
        theirs.close()
        return report

    def _start(self) -> None:
        self._wire, theirs = Wire.pair()
        self._popen = subprocess.Popen(
            [sys.executable, __file__, str(theirs.socket.fileno())],
            pass_fds=[theirs.socket.fileno()],
            stdin=subprocess.DEVNULL,
            # A test may find the processes of its runs by their environment: this is none.
            env={n: v for n, v in os.environ.items() if not n.startswith("QUORATE_TEST")},
        )
        theirs.close()
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._wire is not None
        assert self._popen is not None
        self._wire.close()
        self._popen.wait()


WARM = Warm()


def _text(file: IO[bytes]) -> str:
    """Return all that is in a file."""
    file.seek(0)
    return file.read().decode()


class Forked(subprocess.Popen[str]):
    """A run in a fork. It is another process's child, which tells how it ends.

    Args:
        report: where that is told.
        out: a descriptor to read what it prints from.
    """

    def __init__(self, pid: int, report: Wire, out: int) -> None:
        self.args, self.pid, self.returncode = [], pid, None
        self.stdin, self.stdout, self.stderr = None, os.fdopen(out), None
        self.text_mode = self.universal_newlines = True
        self._report = report
        self._child_created, self._communication_started = True, False
        self._input, self._sigint_wait_secs = None, 0.25
        self._waitpid_lock = threading.Lock()

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return as ``os.waitpid`` does: the pid, or 0 while it lives; and the status."""
        limit_s = 0 if wait_flags & os.WNOHANG else None
        if not select.select([self._report.socket], [], [], limit_s)[0]:
            return 0, 0
        ended = self._report.receive()
        self._report.close()
        assert ended is not None
        return self.pid, ended["status"]

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid and self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def serve(wire: Wire) -> list[str]:
    """Return the module and its arguments in a fork, and there alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks but themselves
    while (message := wire.receive()) is not None:
        report, out, err = wire.fds
        wire.fds.clear()
        importlib.import_module(message["arguments"][0])  # what others of its kind have then too
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wire.close()
            end = Wire(socket.socket(fileno=report))
            if (pid := os.fork()) == 0:
                end.close()
                for fd, target in ((out, 1), (err, 2)):
                    os.dup2(fd, target)
                    os.close(fd)
                if message["mark"]:
                    os.setpgid(0, 0)
                    be_marked(message["mark"])
                tempfile.tempdir = None  # it is the environment's to say
                os.environ.clear()
                os.environ.update(message["env"])
                os.chdir(message["folder"])
                arguments: list[str] = message["arguments"]
                return arguments
            os.close(out)
            os.close(err)
            if message["mark"]:
                with suppress(OSError):  # whoever of the two is first
                    os.setpgid(pid, pid)
            end.send({"pid": pid})
            _, status = os.waitpid(pid, 0)
            end.send({"status": status})
            os._exit(0)
        for fd in (report, out, err):
            os.close(fd)
    os._exit(0)


MARKS: list[mmap.mmap] = []  # in a fork: its page


def be_marked(mark: str) -> None:
    """Have this process, and its forks, found by a mark: by the name of a page of their memory."""
    fd = os.memfd_create(mark)
    os.ftruncate(fd, mmap.PAGESIZE)
    MARKS.append(mmap.mmap(fd, mmap.PAGESIZE))
    os.close(fd)


def is_marked(process: Path, mark: str) -> bool:
    """Return whether a process has such a page.

    Args:
        process: its folder in ``/proc``.
    """
    is_fork = __file__.encode() in (process / "cmdline").read_bytes()
    return is_fork and f"/memfd:{mark} ".encode() in (process / "maps").read_bytes()


def fork_server_in_waiting() -> int | None:
    """Fork a process that is to be the run's first fork server: it need not import torch anew.

    Its code, its parent and what it is given are those of a fork server from nothing. Later ones,
    after a kill, come from nothing.

    Returns:
        In the fork server, when it is wanted, the descriptor to run it with; else None.
    """
    from quorate.machine.environment import child_environment
    from quorate.transports.processes import fork_server, starter

    ours, theirs = Wire.pair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        for number in JOB_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        die_with(parent)
        ours.close()
        if (message := theirs.receive()) is None:
            os._exit(0)
        (wire,) = theirs.fds
        theirs.close()
        os.environ.clear()
        os.environ.update(message["env"])
        os.chdir(message["folder"])
        sys.path[:] = message["path"]
        return wire
    theirs.close()
    spawned = starter._run

    def run(module: str, fds: dict[str, int], script: Any, *, spins: bool) -> Any:
        nonlocal pid
        if module != fork_server.__name__ or pid == 0:
            return spawned(module, fds, script, spins=spins)
        env = child_environment({} if spins else {"OMP_WAIT_POLICY": "passive"})
        message = {"env": env, "folder": script.folder, "path": starter._path()}
        ours.send(message, [fds["wire"]])
        ours.close()
        found = Adopted(pid)
        pid = 0
        return found

    starter._run = run
    return None


class Adopted(subprocess.Popen[bytes]):
    """A child of this process that something else than ``Popen`` has started."""

    def __init__(self, pid: int) -> None:
        self.args, self.pid, self.returncode = [], pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  torch imports it with the first optimizer

    import quorate.commands.inspect
    import quorate.commands.main
    import quorate.commands.run
    import quorate.trainer
    from quorate.transports.processes import fork_server

    # Else each fork looks through torch's 300,000 objects as it ends, and copies the pages they are
    # in: 0.8 s of a core.
    gc.collect()
    gc.freeze()
    module, *sys.argv[1:] = serve(Wire(socket.socket(fileno=int(sys.argv[1]))))
    if module != "quorate":
        sys.modules.pop(module, None)  # it is run as a program
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
    if (
        sys.argv[1:2] == ["run"]
        and not {"towers", "ray"} & set(sys.argv)
        and (wire := fork_server_in_waiting()) is not None
    ):
        fork_server.run(wire=wire)
        sys.exit()
    sys.exit(quorate.commands.main.main())
