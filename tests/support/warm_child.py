"""Child runs of a command, in forks of the process that has imported what every run imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from support.warm import WARM

from quorate.commands.options import as_typed


def child_run(limit_s: Callable[[Mapping[str, Any]], float]) -> Callable[..., int]:
    """Return what stands for ``quorate.commands.child_run.child_run``.

    Args:
        limit_s: how long a run with some options may take.
    """

    def run(
        options: Mapping[str, Any],
        script: str,
        module: str | None,
        arguments: Sequence[str],
        output: IO[bytes],
        is_done: Callable[[], bool],
        environment: Mapping[str, str],
    ) -> int:
        assert module is None
        line = ["run", *as_typed(options), "--", script, *arguments]
        code, out, err = WARM.run(line, {**os.environ, **environment}, limit_s(options))
        output.write((out + err).encode())
        assert code or is_done()
        return code

    return run
