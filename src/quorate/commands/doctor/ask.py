"""Questions to a driver, asked in a separate process that can be killed.

A hanging driver blocks its caller, and no signal except a kill ends the call. So a separate process
asks the questions: the process prints a line of JSON before each question, and one for each answer;
the output before a kill counts. The process dies with its parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from quorate.machine import dies_with_parent
from quorate.machine.descriptors import any_readable

ANSWER_S = 5.0  # limit of the answer to one question
BEGIN_S = 60.0  # limit until the first question: an import of torch from a slow disk
DEATH_S = 0.5  # limit of the death of a killed process


class Asked(NamedTuple):
    """The result of a questioning."""

    lines: list[dict[str, Any]]  # the answers, in order
    failure: str | None  # why there are no more answers; None: complete

    def all(self, name: str) -> list[Any]:
        """Return all answers with a name."""
        return [line[name] for line in self.lines if name in line]

    def first(self, name: str) -> Any:
        """Return the first answer with a name, or None."""
        return next(iter(self.all(name)), None)


def ask(
    module: str,
    path: Sequence[str] = (),
    *,
    answer_s: float = ANSWER_S,
    begin_s: float = BEGIN_S,
) -> Asked:
    """Run ``module.run()`` in a separate process, to its end or until its silence is too long.

    Args:
        module: name of a module in this folder or in ``path``.
        path: folders to search.
    """
    try:
        return _asked(module, path, answer_s, begin_s)
    except OSError as error:  # no more descriptors or processes
        return Asked([], f"no process can be started to ask: {error.strerror}")


def _asked(module: str, path: Sequence[str], answer_s: float, begin_s: float) -> Asked:
    places = [*path, *sys.path, str(Path(__file__).parent)]
    command = [
        sys.executable,
        dies_with_parent.__file__,
        str(os.getpid()),
        module,
        json.dumps(places),
    ]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [*command, "{}"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        assert child.stdout is not None
        with child.stdout:
            lines, question, in_time = _heard(child.stdout.fileno(), answer_s, begin_s)
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may hold a dead process
            child.wait(DEATH_S)
        errors.seek(0)
        printed = errors.read().decode(errors="replace").strip().splitlines()
    failure = None
    if not in_time:
        limit_s = begin_s if question is None else answer_s
        failure = f"no answer within {limit_s:g} s from {question or 'the start'}"
    elif error := next((line["error"] for line in lines if "error" in line), None):
        failure = str(error)
    elif not any("end" in line for line in lines):
        failure = f"asking {question or 'it'} ended its process: " + "".join(printed[-1:])
    return Asked([line for line in lines if not {"asking", "end", "error"} & line.keys()], failure)


def _heard(
    fd: int, answer_s: float, begin_s: float
) -> tuple[list[dict[str, Any]], str | None, bool]:
    """Read the output until its end; return lines, last question, and whether in time."""
    lines: list[dict[str, Any]] = []
    question, text = None, b""
    deadline = time.monotonic() + begin_s
    while True:
        if not any_readable(fd, timeout_s=max(0.0, deadline - time.monotonic())):
            return lines, question, False
        if not (chunk := os.read(fd, 1 << 16)):
            return lines, question, True
        *whole, text = (text + chunk).split(b"\n")
        for line in filter(None, map(_parsed, whole)):
            lines.append(line)
            if "end" in line:  # the teardown of the process is of no interest
                return lines, question, True
            if "asking" in line:
                question, deadline = line["asking"], time.monotonic() + answer_s


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:  # a line printed by a library
        return None
    return answer if isinstance(answer, dict) else None
