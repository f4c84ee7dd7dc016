"""Runs of scripts in tests/scripts: real processes, their ends, and what they leave on disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.warm import WARM

from quorate.commands.main import main

SCRIPTS = Path(__file__).parents[1] / "scripts"


LIMIT_S = 60


TOWER = ("--engine", "towers", "--workers", "1")


class Ended(NamedTuple):
    """A run that is over."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


def command(script: str | Path, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    run = [sys.executable, "-m", "quorate", "run", "--devices", "cpu", *options]
    return [*run, str(SCRIPTS / script), *arguments]


def run(words: list[str], env: Mapping[str, str] | None = None) -> Ended:
    if words[1:3] == ["-m", "quorate"]:
        return Ended(*WARM.run(words[3:], {**os.environ, **(env or {})}, LIMIT_S))
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **(env or {})}
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def run_all(
    commands: Mapping[str, list[str]], env: Mapping[str, str] | None = None
) -> dict[str, Ended]:
    """Two at a time: a start keeps one core busy most of the time."""
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda words: run(words, env), commands.values())
        return dict(zip(commands, ended, strict=True))


def facts(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", "--json", str(run_dir)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def digests(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str | None]:
    found = facts(run_dir, capsys)
    return found["digest"], found.get("averaged_digest")


def on_a_tower(script: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
    """A reference, in this process: no worker is started."""
    assert main(command(script, *arguments, options=(*TOWER, *options))[3:]) == 0


def last_json(text: str) -> Any:
    return json.loads(next(line for line in reversed(text.splitlines()) if line[:1] in "[{"))


def processes_of(mark: str) -> dict[int, str]:
    """Processes with a word in their environment: those of a run, whoever their parent is now."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
    return found


@contextmanager
def started(folder: Path, words: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run, and the word that its processes have; ``folder/temporary`` is for temporary files."""
    mark = f"QUORATE_TEST={uuid.uuid4().hex}"
    # By a short name: sockets of loader processes are in it.
    temporary = Path(tempfile.mkdtemp(prefix="quorate-"))
    link = folder / "temporary"
    link.unlink(missing_ok=True)
    link.symlink_to(temporary)
    env = {**os.environ, "TMPDIR": str(temporary), **dict([mark.split("=")])}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, process_group=0
    ) as process:
        try:
            yield process, mark
        finally:
            for pid in processes_of(mark):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(temporary, ignore_errors=True)  # some who were killed may still write
