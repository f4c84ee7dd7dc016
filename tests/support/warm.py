"""A process that has imported what every run imports, and is forked for each: 6 s of a core less.

Run as a program, this file is that process. A run in a fork of it differs from one of a new
interpreter in nothing that quorate looks at: it is the command's ``main``, with its own arguments,
environment, folder and output, and its workers are processes as ever. Its first fork server is
forked too. Runs that are started by ``subprocess`` have all of it from nothing.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
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
        self, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str, str]:
        """Run the command ``quorate`` to its end: exit code, output, errors.

        Raises:
            subprocess.TimeoutExpired: it was killed for that.
        """
        report, theirs = Wire.pair()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            message = {"arguments": list(arguments), "env": dict(env), "folder": str(Path.cwd())}
            with self._lock:
                if self._wire is None:
                    self._start()
                assert self._wire is not None
                self._wire.send(message, [theirs.socket.fileno(), out.fileno(), err.fileno()])
            theirs.close()
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
            return ended["code"], _text(out), _text(err)

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


def serve(wire: Wire) -> list[str]:
    """Return the arguments in a fork, and there alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks but themselves
    while (message := wire.receive()) is not None:
        report, out, err = wire.fds
        wire.fds.clear()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wire.close()
            end = Wire(socket.socket(fileno=report))
            if (pid := os.fork()) == 0:
                end.close()
                for fd, target in ((out, 1), (err, 2)):
                    os.dup2(fd, target)
                    os.close(fd)
                os.environ.clear()
                os.environ.update(message["env"])
                os.chdir(message["folder"])
                arguments: list[str] = message["arguments"]
                return arguments
            end.send({"pid": pid})
            _, status = os.waitpid(pid, 0)
            end.send({"code": os.waitstatus_to_exitcode(status)})
            os._exit(0)
        for fd in (report, out, err):
            os.close(fd)
    os._exit(0)


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
        ours.close()
        if (message := theirs.receive()) is None:
            os._exit(0)
        os.setpgid(0, 0)
        for number in JOB_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        die_with(parent)
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

    sys.argv[1:] = serve(Wire(socket.socket(fileno=int(sys.argv[1]))))
    if (
        sys.argv[1:2] == ["run"]
        and "towers" not in sys.argv
        and (wire := fork_server_in_waiting()) is not None
    ):
        fork_server.run(wire=wire)
        sys.exit()
    sys.exit(quorate.commands.main.main())
