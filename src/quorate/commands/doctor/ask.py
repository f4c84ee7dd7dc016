"""A question to a driver, asked by a process that can be cut off.

A driver that hangs holds whoever asks it, and no signal but a kill ends that. So the question is
put by a process that does nothing else: it prints a line of JSON before each question, and one for
each answer; what it printed counts when it is cut off. It dies with this process.
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

ANSWER_S = 5.0  # how long the answer to one question may take
BEGIN_S = 60.0  # how long until the first question: an import of torch from a slow disk
DEATH_S = 0.5  # how long a killed process may take to be gone


class Asked(NamedTuple):
    """What came of a question."""

    lines: list[dict[str, Any]]  # the answers, in order
    failure: str | None  # why there are no more

    def all(self, name: str) -> list[Any]:
        """Return every answer of a name."""
        return [line[name] for line in self.lines if name in line]

    def first(self, name: str) -> Any:
        """Return the first answer of a name, or None."""
        return next(iter(self.all(name)), None)


def ask(
    module: str,
    path: Sequence[str] = (),
    *,
    answer_s: float = ANSWER_S,
    begin_s: float = BEGIN_S,
) -> Asked:
    """Run ``module.run()`` in a process of its own, to its end or until it is silent for too long.

    Args:
        module: its name: one of this folder, or found in ``path``.
        path: folders to look in.
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
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it beyond its death
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
    """Read what it prints until it ends; return also its last question, and whether it ended."""
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
            if "end" in line:  # what it has left to tear down is of no interest
                return lines, question, True
            if "asking" in line:
                question, deadline = line["asking"], time.monotonic() + answer_s


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:  # a library printed something of its own
        return None
    return answer if isinstance(answer, dict) else None
