"""Runs of scripts in ``tests/scripts``: real processes, how they end, what they leave on disk."""

from __future__ import annotations

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
WARMED = ("quorate", "torch.distributed.run")  # modules that are run in a fork, see ``warm``


class Ended(NamedTuple):
    """A run that is over."""

    code: int | None  # its exit code; minus the signal that killed it; None: it took too long
    out: str
    err: str
    left: Sequence[str] = ()  # processes, segments and files that were there a minute later

    @property
    def said(self) -> str:
        """Its output, then its errors."""
        return self.out + self.err


def command(script: str | Path, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command line that runs a script on CPUs: one of ``tests/scripts``, or a path."""
    run = [sys.executable, "-m", "quorate", "run", "--devices", "cpu", *options]
    return [*run, str(SCRIPTS / script), *arguments]


def torchrun(ranks: int, *words: str, restarts: int = 0) -> list[str]:
    """Return torchrun's command line for ranks of this machine.

    Args:
        ranks: how many.
        words: what each runs: a script, ``-m`` and a module, or ``--no-python`` and a command.
        restarts: how often they may be started anew.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    start += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    # Its rendezvous is on a port that is free: two tests may run side by side.
    return [*start, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *words]


def run(words: list[str], env: Mapping[str, str] | None = None) -> Ended:
    """Run a command line to its end: quorate's and torchrun's in a fork, see ``warm``.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``LIMIT_S``, and was killed.
    """
    env = {**os.environ, **(env or {})}
    if words[1:2] == ["-m"] and words[2] in WARMED:
        return Ended(*WARM.run(words[3:], env, LIMIT_S, words[2]))
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    return Ended(done.returncode, done.stdout, done.stderr)


def run_all(
    commands: Mapping[str, list[str]], env: Mapping[str, str] | None = None
) -> dict[str, Ended]:
    """Run command lines to their ends, two at a time: a start keeps one core busy mostly."""
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda words: run(words, env), commands.values())
        return dict(zip(commands, ended, strict=True))


def on_a_tower(script: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
    """Run a script on one tower, in this process: its output is this process's."""
    assert main(command(script, *arguments, options=(*TOWER, *options))[3:]) == 0


def inspected(run_dir: Path) -> dict[str, Any]:
    """Return what ``quorate inspect --json`` says of a run directory, in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(["inspect", "--json", str(run_dir)])
    assert code == 0, err.getvalue()
    facts: dict[str, Any] = json.loads(out.getvalue())
    return facts


def digests(run_dir: Path) -> tuple[str, str | None]:
    """Return the digests of a run's weights and of its averaged weights, if it has any."""
    of_run = inspected(run_dir)
    return of_run["digest"], of_run.get("averaged_digest")


def last_json(text: str) -> Any:
    """Return the last line of an output that is JSON, parsed."""
    return json.loads(next(line for line in reversed(text.splitlines()) if line[:1] in "[{"))


def processes_of(mark: str) -> dict[int, str]:
    """Return the processes of a run, whoever their parent is now: command lines by pid.

    Args:
        mark: a word that is in their environment, or names a page of their memory as ``warm`` has
            it, and is in nobody else's.
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
        except OSError:  # it has ended meanwhile
            continue
    return alive


def soon(
    holds: Callable[[], object], what: Callable[[], object] = str, limit_s: float = 60.0
) -> None:
    """Wait until something holds, on a busy machine; fail with what is there if it never does."""
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, what()
        time.sleep(0.02)


@contextmanager
def started(
    folder: Path, words: list[str], *, from_nothing: bool = False
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a run that is to be looked at while it lives; all of its processes are killed after.

    Args:
        folder: gets a link ``temporary`` to the run's folder for temporary files.
        words: the command line: quorate's and torchrun's in a fork, see ``warm``.
        from_nothing: an interpreter of its own also then, and its fork server too.

    Yields:
        The run, and the mark by which all of its processes are found.
    """
    mark = f"QUORATE_TEST={uuid.uuid4().hex}"
    # By a short name: sockets of loader processes are in it.
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
    """Return what a process prints up to the end of a line with a word.

    Raises:
        AssertionError: it ended without it.
    """
    assert process.stdout is not None
    said = bytearray()
    # By itself, not by the file's buffer: ``communicate`` does not know what is in there.
    while not (said.endswith(b"\n") and word.encode() in said):
        read = os.read(process.stdout.fileno(), 1)
        assert read, f"it ended without {word!r}: {said.decode()}"
        said += read
    return said.decode()
