"""A contender in a process of its own, which makes as many updates as it is told.

It prints "ready" once it may be told, then a line "took" with seconds for each number of updates
that it reads. So contenders live at once, and nobody computes while another does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class Child:
    """A contender that runs.

    Args:
        words: the script that it is, and its arguments.
        tree: a checkout whose quorate it imports; None: the installed one.
    """

    def __init__(self, *words: str, tree: Path | None = None) -> None:
        pipe = subprocess.PIPE
        env = None if tree is None else os.environ | {"PYTHONPATH": str(tree.resolve() / "src")}
        self._process = subprocess.Popen(
            [sys.executable, *words], stdin=pipe, stdout=pipe, text=True, env=env
        )
        self._until("ready")

    def took_s(self, updates: int) -> list[float]:
        """Return what it says that so many updates took, in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{updates}\n")
        self._process.stdin.flush()
        return [float(word) for word in self._until("took").split()[1:]]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _until(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line
        raise RuntimeError(f"it ended with {self._process.wait()}")
