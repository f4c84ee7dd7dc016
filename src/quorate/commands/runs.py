"""``quorate runs``: prints a table of run directories: states, steps, best metrics and ages."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quorate.commands.command import Command
from quorate.errors import SettingError, cure
from quorate.machine.regular_file import is_folder
from quorate.machine.valid_json import dumped

if TYPE_CHECKING:
    from quorate.commands.run_facts import RunFacts

HEADS = ("run", "state", "step", "loss", "best", "age", "why")
RIGHT = (2, 3, 5)
SORTS = ("age", "name", "state", "step")
WHY_CHARACTERS = 80

HELP = """List the run directories in FOLDER and below (default: runs).

The state of a run is running, finished, stopped (on request, by a callback or at a limit), failed
(an exception), killed, elsewhere (on another host or in another container), empty (not trained yet)
or damaged. The last column gives the reason; for a killed run, the last column says what is saved.
To check every byte of a run's checkpoints, use quorate inspect.
"""


@click.command(
    "runs", cls=Command, help=HELP, short_help="list runs with state, step, best metric and age"
)
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option(
    "--sort",
    metavar="WORD",
    default="age",
    help=f"order of the list: {', '.join(SORTS)} (default: age)",
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON list with an object per run")
def command(folder: Path, sort: str, as_json: bool) -> int:
    """Print a line per run directory.

    Raises:
        SettingError: there is no such folder.
    """
    from quorate.commands.run_facts import runs_below
    from quorate.machine.text import table
    from quorate.settings import one_of

    one_of("sort", sort, SORTS)
    if not is_folder(folder):
        beside = [path.name for path in _folders_in(folder.parent)]
        fix = cure(folder.name, beside, "name the folder that your run directories are in")
        raise SettingError("FOLDER", str(folder), "a folder", fix)
    found = runs_below(folder)
    now = time.time()
    runs = sorted(found.runs, key=lambda run: _order(run, sort, now))
    if as_json:
        print(dumped([_record(run, now) for run in runs], indent=1))
    elif runs:
        print(table(HEADS, [_cells(run, now) for run in runs], right=RIGHT))
    else:
        print(f"no run directory in {folder} or below it")
    for line in found.unread:
        click.echo(f"quorate: not looked into: {line}", err=True)
    return 0


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if is_folder(path))
    except OSError:
        return []


def _order(run: RunFacts, sort: str, now: float) -> tuple[Any, ...]:
    """Return the sort key of a run; the name decides between equals."""
    age = math.inf if run.at is None else now - run.at
    first: dict[str, Any] = {
        "age": age,
        "name": run.path,
        "state": run.state,
        "step": -1 if run.global_step is None else -run.global_step,
    }
    return first[sort], run.path


def _record(run: RunFacts, now: float) -> dict[str, Any]:
    loss = run.loss if run.loss is None or math.isfinite(run.loss) else None
    age_s = None if run.at is None else round(max(0.0, now - run.at), 3)
    return run._asdict() | {"loss": loss, "age_s": age_s}


def _cells(run: RunFacts, now: float) -> tuple[str, ...]:
    from quorate.machine.text import in_four_places, printable

    step = "" if run.global_step is None else f"{run.global_step:,}"
    if run.last_step is not None:
        step += f"/{run.last_step:,}"
    best = ""
    if run.best is not None:
        metric = printable(run.best["metric"], 30)
        best = f"{metric} {in_four_places(run.best['value'])} at {run.best['global_step']:,}"
    return (
        run.path,
        run.state,
        step,
        "" if run.loss is None else in_four_places(run.loss),
        best,
        "" if run.at is None else age(now - run.at),
        printable(run.why, WHY_CHARACTERS),
    )


def age(seconds: float) -> str:
    """Return a time span in its largest unit: ``40 s``, ``5 min``, ``3 h``, ``2 d``."""
    for unit, of_next in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < of_next:
            return f"{max(0, int(seconds))} {unit}"
        seconds /= 24 if unit == "h" else 60
    return f"{int(seconds)} d"
