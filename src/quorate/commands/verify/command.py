"""``quorate verify``: whether a script gives the same bits on any number of workers; why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quorate.commands.command import ScriptCommand
from quorate.commands.options import given, setting_options
from quorate.errors import SettingError

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
@click.option("--towers/--no-towers", default=True, help="also on towers, beside processes (yes)")
@click.option("--resume/--no-resume", default=True, help="also stopped and resumed (yes)")
@click.option("--kill/--no-kill", default=True, help="also with a worker process killed (yes)")
@setting_options(
    *("devices", "shards", "engine", "threads", "address", "worker_resources"),
    *("update", "seed", "precision", "kernels", "memory_fraction", "compile", "soft_placement"),
)
def command(
    script: str,
    arguments: tuple[str, ...],
    workers: str,
    updates: int,
    towers: bool,
    resume: bool,
    kill: bool,
    shards: int | None,
    **settings: Any,
) -> int:
    """Run the script once per number of workers and way, compare, and say where they part and why.

    Returns:
        0: the same bits. 1: a difference was found.

    Raises:
        SettingError: an option cannot work.
        UserError: the script fails on any number of workers, or has nothing to compare.
    """
    from quorate.commands.child_run import ended_by_sigterm
    from quorate.commands.verify.runs import Program, runs_of
    from quorate.commands.verify.verdict import Way, verdict
    from quorate.settings import whole

    if not Path(script).is_file():
        raise SettingError("script", script, "a Python file", "check the path")
    whole("updates", updates, least=1)
    counts = _counts(workers)
    wanted = {Way.TOWERS: towers, Way.RESUMED: resume, Way.KILLED: kill}
    ways = frozenset(way for way, is_wanted in wanted.items() if is_wanted)
    program = Program(script, arguments, given(settings), updates, ways)
    with ended_by_sigterm():
        runs, notes = runs_of(program, counts, shards)
    outcome = verdict(runs)
    print("\n" + "\n".join([*outcome.lines, *notes]))
    return 0 if outcome.is_same else 1


def _counts(text: str) -> list[int]:
    """Return the numbers of workers; a single one is run twice."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingError("workers", text, "numbers of workers such as 1,2,3", "list them")
    return counts * 2 if len(counts) == 1 else counts
