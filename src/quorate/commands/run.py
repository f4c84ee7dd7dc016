"""``quorate run``: a script, with options that override what it passes to ``Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quorate.commands.command import ScriptCommand
from quorate.commands.options import given, setting_options
from quorate.errors import SettingError
from quorate.machine.dies_with_parent import die_with
from quorate.settings import real

HELP = """Run a training script, with options that override what it passes to Trainer.

The first word behind the script that is none of these options is the script's, and so is all that
follows it; after -- all is.
"""


@click.command("run", cls=ScriptCommand, help=HELP, short_help="run a training script")
@setting_options()
@click.option(
    "--profile",
    metavar="FILE",
    help="measure where a step's time goes, write it as JSON, and end; see quorate bench",
)
@click.option("--profile-s", type=float, help="seconds to measure (8), after a warm-up")
@click.option(
    "--record",
    metavar="FOLDER",
    help="note digests of all that is computed in an empty folder, and end; see quorate verify",
)
@click.option("--record-updates", type=int, help="how many updates to record (20)")
@click.option("--dies-with", type=int, metavar="PID", hidden=True)
def command(
    script: str,
    arguments: tuple[str, ...],
    profile: str | None,
    profile_s: float | None,
    record: str | None,
    record_updates: int | None,
    dies_with: int | None,
    **settings: Any,
) -> int:
    """Run the script as ``__main__`` in this process.

    Raises:
        SettingError: there is no such script, or nothing can be written where it is to be.
        Whatever the script raises: an exception of its own ends in its traceback.
    """
    if dies_with is not None:
        die_with(dies_with)
    file = Path(script)
    if not file.is_file():
        raise SettingError("script", script, "a Python file", "check the path")
    options = given(settings)
    if profile is not None:
        options["profile"] = _absolute_file(profile)
    if profile_s is not None:
        options["profile_s"] = real("profile_s", profile_s, above=0)
    if record is not None:
        options["record"] = _empty_folder(record)
    if record_updates is not None:
        options["record_updates"] = record_updates
    from quorate.transports.processes.script import Script  # imports torch

    Script(str(file.resolve()), None, arguments, str(Path.cwd()), options).run()
    return 0


def _absolute_file(name: str) -> str:
    """Return the path of a file to write, whatever folder the script goes to."""
    file = Path(name).absolute()
    if not file.parent.is_dir():
        raise SettingError("profile", name, "a file in a folder", "make the folder")
    return str(file)


def _empty_folder(name: str) -> str:
    folder = Path(name).absolute()
    if not folder.is_dir() or any(folder.iterdir()):
        raise SettingError("record", name, "an empty folder", "make one")
    return str(folder)
