"""Runs of a bench: each in a separate process, with a temporary run directory."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quorate.commands.bench.contenders import Contender
from quorate.commands.bench.measured import Measured
from quorate.commands.child_run import NO_SAVES_S, child_run, last_error
from quorate.errors import QuorateError, RunError, UserError


class BenchProgram(NamedTuple):
    """The program to run, apart from the contender."""

    script: str
    module: str | None  # in the place of the script
    arguments: tuple[str, ...]
    options: Mapping[str, Any]  # options of quorate run, by name
    seconds: float  # time to measure


def run(
    program: BenchProgram,
    contender: Contender,
    shards: int | None,
    log: Path,
    *,
    more: Mapping[str, Any] | None = None,
    look: Callable[[Path], None] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Measured:
    """Run the script once, and measure its first training loop. Blocks.

    Args:
        shards: shards per batch; None: the script's number.
        log: file for the output of a failed run.
        more: options of ``quorate run``, with priority over all other options.
        look: called with the run directory before its removal.
        is_stopped: returns whether the run has to end.

    Raises:
        UserError: the run ended with exit code 2, or has no training loop to measure.
        RunError: the run failed otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="quorate-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        file = folder / "measured.json"
        options = {
            **program.options,
            "devices": contender.devices,
            "workers": contender.workers,
            "shards": shards,
            "run_dir": folder / "run",
            "save_every_s": NO_SAVES_S,
            "profile": file,
            "profile_s": program.seconds,
            **(more or {}),
        }
        with (folder / "output").open("wb") as output:
            words = program.script, program.module, program.arguments
            code = child_run(options, *words, output, lambda: file.exists() or is_stopped())
        look(folder / "run")
        if file.exists():
            return Measured.from_json(json.loads(file.read_text(encoding="utf-8")))
        text = (folder / "output").read_text(encoding="utf-8", errors="replace")
    log.write_text(text, encoding="utf-8")
    raise _failure(contender, code, f"{last_error(text)}; all of its output: {log}")


def _failure(contender: Contender, code: int, last: str) -> QuorateError:
    where = f"the run on {contender.label()}"
    if code == 0:
        return UserError(
            f"{where} ended before anything was measured: it has no training loop, or one that is "
            "over in the warm-up; give it more epochs, or lower --seconds"
        )
    if code == 2:
        return UserError(f"{where} failed: {last}")
    if code < 0:
        ended = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return RunError(f"{where} {ended}; it printed last: {last}")
    return RunError(f"{where} ended with exit code {code}: {last}")
