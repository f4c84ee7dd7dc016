"""The output of a run, read while the run lives."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from support.runs import LIMIT_S
from support.warm import WARM


class Heard:
    """A run, and all lines so far. A thread reads the lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def all(self) -> str:
        """All lines."""
        return "".join(self.lines)

    def wait_for(self, word: str, after: int = 0) -> int:
        """Return the number of lines up to the first line with the word."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for number, line in enumerate(self.lines[after:], after + 1):
                if word in line:
                    return number
            assert self._thread.is_alive(), f"no {word!r}: {self.all}"
            assert time.monotonic() < deadline, f"no {word!r}: {self.all}"
            time.sleep(0.05)

    def ended(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit code of the run, once the run has ended."""
        code = self.process.wait(limit_s)
        self._thread.join()
        return code


@contextmanager
def heard(words: Sequence[str], env: Mapping[str, str]) -> Iterator[Heard]:
    """Start a run, and kill the run if it is alive in the end.

    Args:
        words: the command line of quorate, run in a fork, see ``warm``.
        env: additional variables, beside the variables of this process.
    """
    with WARM.start(words[3:], {**os.environ, **env}) as process:
        listener = Heard(process)
        try:
            yield listener
        finally:
            process.kill()
            listener.ended()
