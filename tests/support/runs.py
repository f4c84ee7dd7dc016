"""Runs of scripts in ``tests/scripts``: real processes, their ends, their files on disk."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from support.warm import WARM, is_marked

from quorate.__main__ import main

SCRIPTS = Path(__file__).parents[1] / "scripts"
TOWER = ("--engine", "towers", "--workers", "1")
LIMIT_S = 300  # of a run, on a busy machine
WARMED = ("quorate", "torch.distributed.run")  # modules run in a fork, see ``warm``


class Ended(NamedTuple):
    """A finished run."""

    code: int | None  # exit code; minus the killing signal; None: the run took too long
    out: str
    err: str
    left: Sequence[str] = ()  # processes, segments and files present a minute later

    @property
    def said(self) -> str:
        """The output, then the errors."""
        return self.out + self.err


def command(script: str | Path, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command line for a script on CPUs: a name in ``tests/scripts``, or a path."""
    run = [sys.executable, "-m", "quorate", "run", "--devices", "cpu", *options]
    return [*run, str(SCRIPTS / script), *arguments]


def torchrun(ranks: int, *words: str, restarts: int = 0) -> list[str]:
    """Return torchrun's command line for ranks of this machine.

    Args:
        ranks: the number of ranks.
        words: for each rank: a script, ``-m`` and a module, or ``--no-python`` and a command.
        restarts: how often the ranks may be started anew.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    start += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    # The rendezvous is on a free port: two tests may run side by side.
    return [*start, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *words]


def run(words: list[str], env: Mapping[str, str] | None = None) -> Ended:
    """Run a command line to its end: quorate's and torchrun's in a fork, see ``warm``.

    Raises:
        subprocess.TimeoutExpired: the run was killed after ``LIMIT_S``.
    """
    env = {**os.environ, **(env or {})}
    if words[1:2] == ["-m"] and words[2] in WARMED:
        return Ended(*WARM.run(words[3:], env, LIMIT_S, words[2]))
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    return Ended(done.returncode, done.stdout, done.stderr)


def run_all(
    commands: Mapping[str, list[str]], env: Mapping[str, str] | None = None
) -> dict[str, Ended]:
    """Run command lines to their ends, two at a time: a start mostly keeps a single core busy."""
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda words: run(words, env), commands.values())
        return dict(zip(commands, ended, strict=True))


def on_a_tower(script: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
    """Run a script on a single tower, in this process: the output is this process's."""
    assert main(command(script, *arguments, options=(*TOWER, *options))[3:]) == 0


def inspected(run_dir: Path) -> dict[str, Any]:
    """Return the output of ``quorate inspect --json`` on a run directory, in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(["inspect", "--json", str(run_dir)])
    assert code == 0, err.getvalue()
    facts: dict[str, Any] = json.loads(out.getvalue())
    return facts


def digests(run_dir: Path) -> tuple[str, str | None]:
    """Return the digests of a run's weights and of the averaged weights, if any."""
    of_run = inspected(run_dir)
    return of_run["digest"], of_run.get("averaged_digest")


def last_json(text: str) -> Any:
    """Return the last line of JSON in an output, parsed."""
    return json.loads(next(line for line in reversed(text.splitlines()) if line[:1] in "[{"))


def processes_of(mark: str) -> dict[int, str]:
    """Return the processes of a run, whoever their parent is now: command lines by pid.

    Args:
        mark: a word in their environment, or the name of a page of their memory as made by
            ``warm``, and in no other process's.
    """
    alive = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (
                mark.encode() in (entry / "environ").read_bytes() or is_marked(entry, mark)
            ):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    alive[int(entry.name)] = (entry / "cmdline").read_bytes().decode()
        except OSError:  # the process has ended meanwhile
            continue
    return alive


def soon(
    holds: Callable[[], object], what: Callable[[], object] = str, limit_s: float = 60.0
) -> None:
    """Wait until a condition holds, on a busy machine; fail with the present state if never."""
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, what()
        time.sleep(0.1)  # conditions look at all processes


@contextmanager
def started(
    folder: Path, words: list[str], *, from_nothing: bool = False
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a run, to be watched during its life; afterwards all processes of the run are killed.

    Args:
        folder: gets a link ``temporary`` to the run's folder for temporary files.
        words: the command line: quorate's and torchrun's in a fork, see ``warm``.
        from_nothing: a new interpreter also then, with a separate fork server too.

    Yields:
        The run, and the mark for finding all of its processes.
    """
    mark = f"QUORATE_TEST={uuid.uuid4().hex}"
    # A short name: the folder has sockets of loader processes.
    temporary = Path(tempfile.mkdtemp(prefix="quorate-"))
    link = folder / "temporary"
    link.unlink(missing_ok=True)
    link.symlink_to(temporary)
    env = {**os.environ, "TMPDIR": str(temporary), **dict([mark.split("=")])}
    process: subprocess.Popen[str]
    is_warm = words[1:2] == ["-m"] and words[2] in WARMED and not from_nothing
    if is_warm and sys.platform == "linux":
        process = WARM.start(words[3:], env, mark, words[2])
    else:
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            process_group=0,
        )
    with process:
        try:
            yield process, mark
        finally:
            for pid in processes_of(mark):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(temporary, ignore_errors=True)  # some who were killed may still write


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    """Return the output of a process up to the end of a line with a word.

    Raises:
        AssertionError: the process ended without the word.
    """
    assert process.stdout is not None
    said = bytearray()
    # Unbuffered, without the file's buffer: ``communicate`` does not know the buffer's contents.
    while not (said.endswith(b"\n") and word.encode() in said):
        read = os.read(process.stdout.fileno(), 1)
        assert read, f"it ended without {word!r}: {said.decode()}"
        said += read
    return said.decode()
