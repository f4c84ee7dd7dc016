"""``quorate verify`` and ``bench`` in this process; their runs are forks with torch imported."""

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import IO, Any

import pytest
from support.warm import WARM

from quorate.__main__ import main
from quorate.commands.options import as_typed


class WarmRuns:
    """A command in this process.

    Args:
        name: "verify" or "bench".
        patch: replaces the command's runs by ``run``.
        captured: the captured output.
    """

    def __init__(
        self, name: str, patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]
    ) -> None:
        self.here = False  # runs are trainings in this process, with towers only
        self.over_in = 0  # the run at the end of the limit, from 1; 0: none
        self.limit_s = 100.0  # of a run
        self._name, self._patch, self._captured = name, patch, captured
        self._runs = 0
        patch.setattr(f"quorate.commands.{name}.runs.child_run", self.run)

    def __call__(self, *words: str, code: int) -> str:
        """Return the command's output, then its errors; the command has to end with a code."""
        found = main([self._name, *words])
        shown = self._captured.readouterr()
        assert found == code, shown.out + shown.err
        return shown.out + shown.err

    def run(
        self,
        options: Mapping[str, Any],
        script: str,
        module: str | None,
        arguments: Sequence[str],
        output: IO[bytes],
        is_done: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Stand for ``quorate.commands.child_run.child_run``."""
        assert module is None
        self._runs += 1
        if self._runs == self.over_in:
            now = time.monotonic
            self._patch.setattr(time, "monotonic", lambda: now() + 1e6)
            is_done()  # raises
        line = ["run", *as_typed(options), "--", script, *arguments]
        if self.here:
            said = io.StringIO()
            with redirect_stdout(said), redirect_stderr(said):
                try:
                    code = main(line)
                except SystemExit as end:  # enough is recorded
                    code = int(end.code or 0)
            text = said.getvalue()
        else:
            code, out, err = WARM.run(line, {**os.environ, **(environment or {})}, self.limit_s)
            text = out + err
        output.write(text.encode())
        return code
