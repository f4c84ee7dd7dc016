"""``quorate verify``: whether a script gives the same bits on any number of workers; why not."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from quorate.commands.command import ScriptCommand
from quorate.commands.options import given, setting_options
from quorate.commands.program import require_program
from quorate.errors import SettingError, UserError
from quorate.machine.standard_streams import Steady

if TYPE_CHECKING:
    from quorate.commands.verify.runs import AllRuns
    from quorate.commands.verify.verdict import BitsVerdict

WORKERS, UPDATES, LIMIT_S = "1,2,3", 20, 3600.0

HELP = """Check whether a script gives the same bits on any number of workers, and if not, why not.

Options may stand before or after SCRIPT. After SCRIPT, words that are not options of this command
go to the script. After --, all words go to the script.
"""


@click.command(
    "verify",
    cls=ScriptCommand,
    help=HELP,
    short_help="check for the same bits on any number of workers",
)
@click.option(
    "--workers",
    metavar="1,2,3",
    default=WORKERS,
    help=f"numbers of workers to compare (default: {WORKERS})",
)
@click.option(
    "--updates",
    type=int,
    metavar="N",
    default=UPDATES,
    help=f"number of updates, with a comparison after each (default: {UPDATES})",
)
@click.option(
    "--towers/--no-towers", default=True, help="also compare towers with processes (default: yes)"
)
@click.option(
    "--resume/--no-resume",
    default=True,
    help="also compare a run that is stopped and resumed (default: yes)",
)
@click.option(
    "--kill/--no-kill",
    default=True,
    help="also compare a run that loses a worker process (default: yes)",
)
@click.option(
    "--limit",
    type=float,
    metavar="SECONDS",
    default=LIMIT_S,
    help="time limit for all runs together; comparisons left out are listed, with exit code 2 "
    f"(default: {LIMIT_S:g})",
)
@click.option("--json", "as_json", is_flag=True, help="print the result as one JSON object")
@setting_options(
    *("devices", "split", "pipeline", "shards", "engine", "threads", "address"),
    "worker_resources",
    *("update", "seed", "precision", "kernels", "memory_fraction", "compile", "random"),
    "soft_placement",
)
def command(
    script: str,
    module: str | None,
    arguments: tuple[str, ...],
    workers: str,
    updates: int,
    towers: bool,
    resume: bool,
    kill: bool,
    limit: float,
    as_json: bool,
    shards: int | None,
    **settings: Any,
) -> int:
    """Run the script per number of workers and way, compare, and print differences and causes.

    Returns:
        0: the same bits. 1: a difference was found.

    Raises:
        SettingError: an option is not valid.
        UserError: the script fails on any number of workers, or has nothing to compare; or the
            limit was reached before all comparisons, and all comparisons made were equal.
    """
    from quorate.commands.child_run import ended_by_sigterm
    from quorate.commands.verify.runs import Limit, Program, runs_of
    from quorate.commands.verify.verdict import Way, verdict
    from quorate.settings import integer, real

    require_program(script, module)
    integer("updates", updates, least=1)
    real("limit", limit, above=0)
    counts = _counts(workers)
    wanted = {Way.TOWERS: towers, Way.RESUMED: resume, Way.KILLED: kill}
    ways = frozenset(way for way, is_wanted in wanted.items() if is_wanted)
    say = partial(print, flush=True, file=Steady(sys.stderr if as_json else sys.stdout))
    options = given(settings)
    program = Program(script, module, arguments, options, updates, ways, Limit(limit), say)
    with ended_by_sigterm():
        done = runs_of(program, counts, shards)
    outcome = verdict(done.runs)
    if as_json:
        print(json.dumps(_record(outcome, done), indent=1))
    else:
        print("\n" + "\n".join([*outcome.lines, *done.notes]))
    if outcome.is_same and done.left is not None:
        raise UserError(
            f"the limit of {limit:g} s was over in the run on {done.left}: nothing is said of it, "
            "nor of those after it; raise --limit, or lower --updates"
        )
    return 0 if outcome.is_same else 1


def _record(outcome: BitsVerdict, done: AllRuns) -> dict[str, Any]:
    return {
        "same_bits": outcome.is_same,
        "is_complete": done.left is None,
        "lines": outcome.lines,
        "notes": done.notes,
        "runs": [
            {
                "run": run.label,
                "workers": run.workers,
                "way": run.way.name.lower(),
                "updates": run.updates,
                "failed": run.failed,
                "why": run.why if run.failed else None,
                "doubts": run.doubts,
            }
            for run in done.runs
        ],
    }


def _counts(text: str) -> list[int]:
    """Return the numbers of workers; a single number is run twice."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingError("workers", text, "numbers of workers such as 1,2,3", "list them")
    return counts * 2 if len(counts) == 1 else counts
