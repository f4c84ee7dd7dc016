"""``quorate report``: one or two runs as an HTML page."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from quorate.commands.command import Command
from quorate.errors import PackageError, SettingError

NAME = "report.html"
HELP = """Write a run as an HTML page: curves, events, workers, checkpoints, settings.

The page is one file that needs no network. Two run directories are compared: settings that differ,
digests, and the first update whose loss differs.
"""


@click.command("report", cls=Command, help=HELP, short_help="write a run as an HTML page")
@click.argument("run_dirs", metavar="RUN_DIR [RUN_DIR]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--output", metavar="FILE", help=f"the page ({NAME} in the first RUN_DIR)")
def command(run_dirs: tuple[Path, ...], output: str | None) -> int:
    """Write the page.

    Raises:
        SettingError: a run directory cannot be read, the page cannot be written, or the plotting
            library is missing.
    """
    if not 1 <= len(run_dirs) <= 2:
        got = " ".join(map(str, run_dirs)) or None
        raise SettingError("RUN_DIR", got, "one run directory, or two to compare", "name them")
    if find_spec("matplotlib") is None:
        raise PackageError("matplotlib", "report", "reports")
    from quorate.commands.report.page import report
    from quorate.commands.report.run_history import run_history
    from quorate.machine.atomic_file import write_atomically
    from quorate.services.run_directory.settings import new_file

    histories = [run_history(run_dir) for run_dir in run_dirs]
    path = new_file("output", run_dirs[0] / NAME if output is None else output)
    page = report(histories)
    try:
        write_atomically(path, page)
    except OSError as error:
        fix = f"{error.strerror or error}; name another file with --output"
        raise SettingError("output", str(path), "a file that can be written", fix) from error
    print(f"written: {path}, {len(page.encode()):,} bytes")
    return 0
