"""A process that does a job, with a time by which it has to answer. Without torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from on_gpu.job import Job

SCRIPT = Path(__file__).parents[1] / "gpu.py"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # torch's deterministic matrix products need it
MODULES = re.compile(r"^(\w+\.)+(?=\w+:)")  # in front of the name of an exception
RAISED = re.compile(r"[\w.]+(Error|Exit|Exception)\b")


class Failed(NamedTuple):
    """What could not be measured."""

    why: str


class Process:
    """A job under way. ``close`` it: leaving the context does.

    Args:
        job: what it does.
        until: ``time.monotonic()`` when the process and all that it started are killed.
    """

    def __init__(self, job: Job, until: float) -> None:
        env = {name: value for name, value in os.environ.items() if name != WORKSPACE}
        if job.deterministic:
            env[WORKSPACE] = ":4096:8"
        self._limit_s = max(0.0, until - time.monotonic())
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  a pipe would fill up
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--job", json.dumps(job._asdict())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
            start_new_session=True,  # so that the ranks of DDP end with it
        )
        self._is_late = False
        self._timer = threading.Timer(self._limit_s, self._end_late)
        self._timer.start()

    def answer(self) -> dict[str, Any] | Failed:
        """Return its next line of JSON, or why there is none. Blocks."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # else libraries print
                found: dict[str, Any] = json.loads(line)
                return found
        code = self._process.wait()
        if self._is_late:
            return Failed(f"no end within its {self._limit_s:.0f} s")
        self._errors.seek(0)
        lines = self._errors.read().splitlines()
        raised = [line for line in lines if RAISED.match(line)]
        said = (raised or lines or [""])[-1] or f"exit code {code}"
        return Failed(MODULES.sub("", said))

    def run(self, steps: int) -> dict[str, Any] | Failed:
        """Have it make so many steps, and return what it says of them. Blocks."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and ``answer`` says why
            print(json.dumps({"steps": steps}), file=self._process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """Kill it if it is still there, and what it has started."""
        self._timer.cancel()
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with suppress(BrokenPipeError):  # a line to it is still in the buffer
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_late(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
