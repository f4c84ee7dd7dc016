"""Former DDP scripts on several engines: the same bits, or one line that names the call.

All of them: ``python -m support.former_ddp`` in ``tests``, or with words that are in their names.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support.runs import command, inspected, run

FOLDER = Path(__file__).parents[1] / "strangers"
TORCHRUN = "torchrun 2"
WAYS = {
    "1 tower": ("--engine", "towers", "--workers", "1"),
    "3 towers": ("--engine", "towers", "--workers", "3"),
    "2 processes": ("--engine", "processes", "--workers", "2"),
    "2 ranks": ("--engine", "collective", "--workers", "2"),
    "3 ranks": ("--engine", "collective", "--workers", "3"),
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


def outcomes(case: Any) -> dict[str, Outcome]:
    """Run a case in all ways."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(case.script())
        found = {}
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
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        words += ["--monitor-interval", "0.1", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "localhost:0", str(script), str(run_dir)]
    try:
        ended = run(words)
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


def main() -> None:
    """Print the table of all cases, or of those whose names have a word in them."""
    words = sys.argv[1:]
    for name, case in cases().items():
        if words and not any(word in name for word in words):
            continue
        found = outcomes(case)
        kinds = [f"{way}: {outcome.kind}" for way, outcome in found.items()]
        print(f"{name:40} {', '.join(kinds)}", flush=True)
        texts = {o.text: None for o in found.values() if o.kind != SAME}
        for text in texts:
            print(f"    {text[:420]}", flush=True)


if __name__ == "__main__":
    main()
