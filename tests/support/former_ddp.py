"""Former DDP scripts on several engines: the same bits, or one line that names the call.

As a program: all of them on one tower, for ``on_a_tower``.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.runs import Ended, command, inspected, run, torchrun

import quorate
from quorate.__main__ import main as quorate_main

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "strangers"
SOURCE = Path(quorate.__file__).parents[1]
TORCHRUN = "torchrun 2"
HERE = "here"  # on one tower, in this process
TOWER = ("--engine", "towers", "--workers", "1")
WAYS = {
    "2 processes": ("--engine", "processes", "--workers", "2"),
    "2 ranks": ("--engine", "collective", "--workers", "2"),
    TORCHRUN: (),
}
SAME, SAID, REFUSED, WRONG = "same", "said", "refused", "WRONG"


class Outcome(NamedTuple):
    """What became of one way of running a case."""

    kind: str
    text: str  # its digest, its doubt, its line; or what is wrong


def cases() -> Mapping[str, Any]:
    """Return the table of cases, by name."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    table: Mapping[str, Any] = importlib.import_module("former_ddp").FORMER
    return table


def outcomes(case: Any, here: Outcome) -> dict[str, Outcome]:
    """Run a case in all ways; ``here`` is what became of it on a tower."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(case.script())
        found = {HERE: here}
        for way, options in WAYS.items():
            run_dir = Path(folder, way.replace(" ", "-"))
            names = case.torchrun if way == TORCHRUN and case.torchrun is not None else case.names
            shows = way == TORCHRUN and case.before_trainer  # Python does
            found[way] = _outcome(way, script, run_dir, options, names, shows_trace=shows)
        digests = {outcome.text for outcome in found.values() if outcome.kind == SAME}
        return {
            way: Outcome(WRONG, f"silently other bits: {outcome.text:.8}")
            if outcome.kind == SAME and len(digests) > 1
            else outcome
            for way, outcome in found.items()
        }


def on_a_tower() -> dict[str, list[str]]:
    """Run all cases on one tower, one after the other in a process of their own: outcomes.

    Cases change torch, and how Python shows exceptions.
    """
    words = [sys.executable, "-m", "support.former_ddp"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, (TESTS, SOURCE))])}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=True, cwd=TESTS)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def _all_here() -> dict[str, Outcome]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        (script := Path(folder) / "script.py").touch()
        for name, case in cases().items():
            script.write_text(case.script())
            run_dir, sgd = Path(folder, name), torch.optim.SGD
            found[name] = _outcome(HERE, script, run_dir, TOWER, case.names, shows_trace=False)
            torch.optim.SGD = sgd  # type: ignore[misc]
    return found


def _run_here(words: list[str]) -> Ended:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = quorate_main(words[3:])
        except Exception as error:  # as an interpreter would show it
            code = 2
            with suppress(SystemExit):
                sys.excepthook(type(error), error, error.__traceback__)
    return Ended(code, out.getvalue(), err.getvalue())


def _outcome(
    way: str,
    script: Path,
    run_dir: Path,
    options: tuple[str, ...],
    names: str,
    *,
    shows_trace: bool,
) -> Outcome:
    words = command(script, str(run_dir), options=options)
    if way == TORCHRUN:
        words = torchrun(2, str(script), str(run_dir))
    try:
        ended = _run_here(words) if way == HERE else run(words)
    except subprocess.TimeoutExpired:
        return Outcome(WRONG, "it hangs")
    if ended.code != 0:
        if shows_trace and "Default process group has not been initialized" in ended.err:
            return Outcome(REFUSED, "by Python's traceback, before there is a Trainer")
        # A rank that was refused first may be all that torchrun's report has: it ends the others.
        told = [line.strip().removeprefix("traceback : ") for line in ended.err.splitlines()]
        lines = [*{line: None for line in told if line.startswith("quorate: ")}]
        if way != TORCHRUN and len(ended.err.splitlines()) != 1:
            return Outcome(WRONG, f"more than a line: {ended.err[-300:]}")
        if len(lines) != 1 or not names or names not in lines[0]:
            return Outcome(WRONG, f"{len(lines)} lines: {ended.err[-300:]}")
        return Outcome(REFUSED, lines[0])
    facts = inspected(run_dir)
    if not names and not facts["doubts"]:
        return Outcome(SAME, facts["digest"])
    if names and facts["doubts"] and names in facts["doubts"][0]:
        return Outcome(SAID, facts["doubts"][0])
    return Outcome(WRONG, f"doubts {facts['doubts']}")


if __name__ == "__main__":
    print(json.dumps(_all_here()))
