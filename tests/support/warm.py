"""A process with every run's imports done, forked for each run: 6 s of a core
less.

Run as a program, this file is the warm process. For quorate, a run in a fork is like a run of a new
interpreter: the fork is the command's ``main``, with separate arguments, environment, folder and
output, and workers are processes as ever. Runs by ``subprocess`` start from nothing. Runs of
``Warm.start`` have the whole end of an interpreter; runs of ``Warm.run`` end in the same way, but
without taking all modules apart.

The kernel keeps the environment from the start of a process: a fork has the environment of the warm
process. To be found by a mark, a run and its forks have a page of memory named after the mark.
"""

import atexit
import gc
import importlib
import json
import mmap
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any

# Imported before the forks: saves each fork the time. Nothing else knows these names, and a missing
# module is passed over. (torch imports dynamo with the first optimizer.)
IMPORTED_FIRST = (
    *("torch._dynamo", "quorate.trainer", "quorate.commands.main", "quorate.commands.run"),
    *("quorate.commands.inspect", "quorate.engines.processes.process_start"),
)
OF_A_TEST = ("QUORATE_TEST", "PYTEST_CURRENT_TEST")  # variables
NUMBER = struct.Struct("<q")  # the length of a request; in a report, the pid and then the status


class Warm:
    """The side of the tests. Any thread may call ``run``, each at its own time.

    Args:
        env: the environment at the start of the process; ``None``: this process's.
        imports: modules imported first.
    """

    def __init__(
        self, env: Mapping[str, str] | None = None, imports: Sequence[str] = IMPORTED_FIRST
    ) -> None:
        self._env, self._imports = env, imports
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def run(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        module: str = "quorate",
        mark: str = "",
    ) -> tuple[int, str, str]:
        """Run the command ``quorate``, or another module, to its end: exit code, output, errors.

        Raises:
            subprocess.TimeoutExpired: the run was killed after the limit.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            outputs = [out.fileno(), err.fileno()]
            forked = Forked(self._begun(module, arguments, env, outputs, mark, ends_soon=True))
            try:
                return forked.wait(timeout_s), _text(out), _text(err)
            except subprocess.TimeoutExpired as late:
                forked.kill()
                forked.wait()
                late.cmd = [*arguments]
                late.add_note(f"it had said:\n{_text(out)}{_text(err)}")
                raise

    def start(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        mark: str = "",
        module: str = "quorate",
        outputs: Sequence[int] = (),
    ) -> "Forked":
        """Start the command ``quorate``, or another module, with errors in the output.

        With a mark, see above, the run leads a process group too. With ``outputs``, descriptors for
        output and errors, there is no pipe to read from.
        """
        if outputs:
            return Forked(self._begun(module, arguments, env, [*outputs], mark))
        ours, theirs = os.pipe()
        report = self._begun(module, arguments, env, [theirs, theirs], mark)
        os.close(theirs)
        return Forked(report, ours)

    def _begun(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        outputs: list[int],
        mark: str,
        *,
        ends_soon: bool = False,
    ) -> int:
        """Begin a run; return a descriptor that tells the pid, and the end of the run."""
        report, theirs = os.pipe()
        request = {"arguments": [module, *arguments], "env": dict(env), "folder": str(Path.cwd())}
        data = json.dumps({**request, "mark": mark, "ends_soon": ends_soon}).encode()
        with self._lock:
            if self._socket is None:
                self._socket = self._started()
            socket.send_fds(self._socket, [NUMBER.pack(len(data))], [theirs, *outputs])
            self._socket.sendall(data)
        os.close(theirs)
        return report

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        popen = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *self._imports],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # A test may find the processes of its runs by their environment: not this process.
            env={n: v for n, v in (self._env or os.environ).items() if not n.startswith(OF_A_TEST)},
        )
        theirs.close()
        atexit.register(popen.wait)
        atexit.register(ours.close)  # first: calls are made in reverse order
        return ours


WARM = Warm()


def _text(file: IO[bytes]) -> str:
    """Return the whole contents of a file."""
    file.seek(0)
    return file.read().decode()


class Forked(subprocess.Popen[str]):
    """A run in a fork: the child of another process, which reports the end of the run.

    Args:
        report: a descriptor, see ``NUMBER``.
        out: a descriptor to read the output from, if wanted.
    """

    def __init__(self, report: int, out: int | None = None) -> None:
        self._report = report
        self.args, self.pid, self.returncode = [], self._told(), None
        self.stdin = self.stderr = None
        self.stdout = None if out is None else os.fdopen(out)
        # Attributes used by the methods of ``Popen``.
        self.text_mode = self.universal_newlines = True
        self._child_created, self._communication_started = True, False
        self._input, self._sigint_wait_secs = None, 0.25
        self._waitpid_lock = threading.Lock()

    def _told(self) -> int:
        number: int = NUMBER.unpack(os.read(self._report, NUMBER.size))[0]
        return number

    def _has_ended(self, timeout_s: float | None) -> bool:
        """Return whether the run has ended, or ends in time."""
        limit_s = None if timeout_s is None else max(0.0, timeout_s)
        with self._waitpid_lock:
            if self.returncode is None and select.select([self._report], [], [], limit_s)[0]:
                self.returncode = os.waitstatus_to_exitcode(self._told())
                os.close(self._report)
        return self.returncode is not None

    def _wait(self, timeout: float | None) -> int:
        if not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        return self.returncode if self._has_ended(0.0) else None


def serve(requests: socket.socket) -> tuple[list[str], bool]:
    """Return, in a fork alone, a module with its arguments, and whether ``Warm.run`` asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks but themselves
    while True:
        header, fds, *_ = socket.recv_fds(requests, NUMBER.size, 3)
        if not header:
            os._exit(0)
        request = json.loads(requests.recv(*NUMBER.unpack(header), socket.MSG_WAITALL))
        importlib.import_module(request["arguments"][0])  # ready for later requests like this
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                return _begin(request, fds), request["ends_soon"]
            _report_end(pid, request["mark"], *fds)
        for fd in fds:
            os.close(fd)


def _begin(request: Mapping[str, Any], fds: list[int]) -> list[str]:
    """Turn this process into the requested run; return the module and its arguments."""
    report, out, err = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    for fd in {report, out, err}:
        os.close(fd)
    if request["mark"]:
        os.setpgid(0, 0)
        be_marked(request["mark"])
    tempfile.tempdir = None  # decided by the environment
    os.environ.clear()
    os.environ.update(request["env"])
    if "coverage" in sys.modules:  # tests/mutants.py records the lines of each test
        from coverage import Coverage

        if (running := Coverage.current()) is not None:
            running.switch_context(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
    os.chdir(request["folder"])
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    sys.path[1:1] = [p for path in paths if (p := str(Path(path).resolve())) not in sys.path]
    arguments: list[str] = request["arguments"]
    return arguments


def _report_end(pid: int, mark: str, report: int, *outputs: int) -> None:
    """Report the pid and the end of a child; then end."""
    for fd in outputs:
        os.close(fd)
    if mark:
        with suppress(OSError):  # a race between parent and child
            os.setpgid(pid, pid)
    with suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(report, NUMBER.pack(pid))
        os.write(report, NUMBER.pack(os.waitpid(pid, 0)[1]))
    os._exit(0)


MARKS: list[mmap.mmap] = []  # in a fork: the page of the mark


def be_marked(mark: str) -> None:
    """Make this process, and its forks, findable by a mark: the name of a page of their memory."""
    fd = os.memfd_create(mark)
    os.ftruncate(fd, mmap.PAGESIZE)
    MARKS.append(mmap.mmap(fd, mmap.PAGESIZE))
    os.close(fd)


def is_marked(process: Path, mark: str) -> bool:
    """Return whether a process, a folder in ``/proc``, has such a page."""
    is_fork = __file__.encode() in (process / "cmdline").read_bytes()
    return is_fork and f"/memfd:{mark} ".encode() in (process / "maps").read_bytes()


def main() -> None:
    """Be the process to fork; in a fork, be the command."""
    connection, *names = sys.argv[1:]
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    # Else each fork looks through torch's 300,000 objects at its end, and copies their pages: 0.8 s
    # of a core.
    gc.collect()
    gc.freeze()
    words, ends_soon = serve(socket.socket(fileno=int(connection)))
    code: object = 0
    try:
        run_program(*words)
    except SystemExit as end:
        code = end.code or 0
        if not (ends_soon and isinstance(code, int)):
            raise
    if ends_soon:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with suppress(ValueError):  # a library has closed a stream
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_program(module: str, *arguments: str) -> None:
    """Be the command, or a module."""
    sys.argv[1:] = arguments
    if module == "quorate":
        from quorate.__main__ import main as run
        from quorate.engines.processes.process_start import fork_server_on_standby

        # Without a ready fork server, a run with worker forks takes 4 s of a core more.
        with fork_server_on_standby() if forks_workers(sys.argv) else nullcontext():
            sys.exit(run())
    sys.modules.pop(module, None)  # run as a program
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def forks_workers(words: Sequence[str]) -> bool:
    """Return whether the command may fork worker processes."""
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    return words[1:2] == ["run"] and "towers" not in words and not is_rank


if __name__ == "__main__":
    main()
