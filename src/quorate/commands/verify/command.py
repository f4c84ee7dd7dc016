"""``quorate verify``: whether a script gives the same bits on any number of workers; why not."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from quorate.commands.command import ScriptCommand
from quorate.commands.options import given, setting_options
from quorate.errors import SettingError

if TYPE_CHECKING:
    from quorate.commands.verify.verdict import Run

WORKERS, UPDATES = "1,2,3", 20

HELP = """Find out whether a script gives the same bits on any number of workers; if not, why not.

Options stand before the script, or right behind it; the first word behind it that is none of them
is the script's, and so is all that follows it; after -- all is.
"""


@click.command(
    "verify", cls=ScriptCommand, help=HELP, short_help="same bits on any number of workers?"
)
@click.option("--workers", metavar="1,2,3", default=WORKERS, help=f"numbers to compare ({WORKERS})")
@click.option(
    "--updates", type=int, default=UPDATES, help=f"after each of which to compare ({UPDATES})"
)
@setting_options(
    *("devices", "shards", "engine", "threads", "update", "seed", "precision"),
    *("memory_fraction", "compile", "soft_placement"),
)
def command(
    script: str,
    arguments: tuple[str, ...],
    workers: str,
    updates: int,
    shards: int | None,
    **settings: Any,
) -> int:
    """Run the script once per number of workers, compare, and say where they part and why.

    Returns:
        0: the same bits. 1: a difference was found.

    Raises:
        SettingError: an option cannot work.
        UserError: the script fails on any number of workers, or has nothing to compare.
    """
    from quorate.commands.child_run import ended_by_sigterm
    from quorate.commands.verify.verdict import verdict
    from quorate.settings import whole

    if not Path(script).is_file():
        raise SettingError("script", script, "a Python file", "check the path")
    whole("updates", updates, least=1)
    counts = _counts(workers)
    program = Program(script, arguments, given(settings), updates)
    with ended_by_sigterm():
        runs = _runs(program, counts, shards)
    outcome = verdict(runs)
    print("\n" + "\n".join(outcome.lines))
    return 0 if outcome.is_same else 1


class Program(NamedTuple):
    """What is run, but for the number of workers."""

    script: str
    arguments: tuple[str, ...]
    options: dict[str, Any]  # of quorate run, by name
    updates: int  # to record


def _counts(text: str) -> list[int]:
    """Return the numbers of workers; a single one is run twice."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingError("workers", text, "numbers of workers such as 1,2,3", "list them")
    return counts * 2 if len(counts) == 1 else counts


def _runs(program: Program, counts: Sequence[int], shards: int | None) -> list[Run]:
    """One run per number, in the order given."""
    # The largest is the first: where the script leaves the number of shards open, it has as many
    # as workers, and all others get that number.
    order = sorted(range(len(counts)), key=lambda n: -counts[n])
    runs: dict[int, Run] = {}
    for n in order:
        again = sum(counts[before] == counts[n] for before in runs) > 0
        run = _run(program, counts[n], shards, is_again=again)
        run.refuse_a_mistake()
        print(f"{run.label}: {run.summary()}", flush=True)
        shards = run.recording.facts.get("shards", shards)
        runs[n] = run
    return [runs[n] for n in range(len(counts))]


def _run(program: Program, workers: int, shards: int | None, *, is_again: bool) -> Run:
    from quorate.commands.child_run import NO_SAVES_S, child_run, last_error
    from quorate.commands.verify import records
    from quorate.commands.verify.verdict import Run

    label = f"{workers} worker{'s' if workers > 1 else ''}{' again' if is_again else ''}"
    with tempfile.TemporaryDirectory(prefix="quorate-verify-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "records"
        folder.mkdir()
        options = {
            **program.options,
            "workers": workers,
            "shards": shards,
            "run_dir": Path(name) / "run",
            "save_every_s": NO_SAVES_S,
            "record": folder,
            "record_updates": program.updates,
        }
        output = Path(name) / "output"
        with output.open("wb") as file:
            code = child_run(
                options,
                program.script,
                program.arguments,
                file,
                lambda: records.has_ended(folder),
            )
        text = output.read_text(encoding="utf-8", errors="replace")
        return Run(label, workers, records.read(folder), code, last_error(text))
