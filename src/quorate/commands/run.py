"""``quorate run``: runs a script, with options that override the arguments of ``Trainer``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quorate.commands.command import ScriptCommand
from quorate.commands.help_text import GroupedOption
from quorate.commands.options import given, setting_options
from quorate.commands.program import require_program
from quorate.errors import SettingError
from quorate.machine.dies_with_parent import die_with
from quorate.machine.regular_file import is_folder, reason_against_new_file
from quorate.machine.surroundings import can_fork, require_current_folder
from quorate.services.display.uncaught import fold_tracebacks
from quorate.settings import integer, real
from quorate.training.observer import observing

if TYPE_CHECKING:
    from quorate.training.observer import Observe

PROFILE_S, RECORD_UPDATES = 8.0, 20
UNUSED = (
    "quorate: {} ended without training: it called neither fit() nor updates() of a "
    "quorate.Trainer, and options of quorate run had no effect"
)

HELP = """Run a training script, with options that override the arguments of its Trainer.

Options may stand before or after SCRIPT. After SCRIPT, words that are not options of this command
go to the script. After --, all words go to the script.
"""

MEASURING: dict[str, Any] = {"cls": GroupedOption, "group": "Measurements, used by other commands"}
ELSEWHERE: dict[str, Any] = {"cls": GroupedOption, "group": "Several machines and ranks"}


@click.command("run", cls=ScriptCommand, help=HELP, short_help="run a training script")
@setting_options()
@click.option(
    "--profile",
    **MEASURING,
    metavar="FILE",
    help="time the parts of a step, write the times to FILE as JSON, and exit; see quorate bench",
)
@click.option(
    "--profile-s",
    **MEASURING,
    type=float,
    metavar="SECONDS",
    default=PROFILE_S,
    help=f"seconds to measure after a warm-up (default: {PROFILE_S:g})",
)
@click.option(
    "--record",
    **MEASURING,
    metavar="FOLDER",
    help="write digests of all computed values to an empty folder, and exit; see quorate verify",
)
@click.option(
    "--record-updates",
    **MEASURING,
    type=int,
    metavar="N",
    default=RECORD_UPDATES,
    help=f"number of updates to record (default: {RECORD_UPDATES})",
)
@click.option(
    "--measure-model",
    **MEASURING,
    metavar="FILE",
    help="measure the time and memory of the model, write both to FILE as JSON, and exit; see "
    "quorate doctor",
)
@click.option(
    "--detached",
    **ELSEWHERE,
    is_flag=True,
    help="run on the head node of a Ray cluster, independently of this terminal; see docs/ray.md",
)
@click.option("--profile-kill", is_flag=True, hidden=True)
@click.option("--record-kill", type=int, metavar="UPDATE", hidden=True)
@click.option("--dies-with", type=int, metavar="PID", hidden=True)
def command(
    script: str,
    module: str | None,
    arguments: tuple[str, ...],
    profile: str | None,
    profile_s: float,
    profile_kill: bool,
    record: str | None,
    record_updates: int,
    measure_model: str | None,
    detached: bool,
    record_kill: int | None,
    dies_with: int | None,
    **settings: Any,
) -> int:
    """Run the script as ``__main__`` in this process.

    Raises:
        SettingError: there is no such program, or an output path is not usable.
        Exception: any exception of the script, with the usual traceback.
    """
    if dies_with is not None:
        die_with(dies_with)
    require_current_folder()
    file = require_program(script, module)
    with ExitStack() as stack:
        if not detached and _may_fork(settings):
            import quorate.trainer  # noqa: F401  with torch: the script wants both, and so do workers
            from quorate.engines.processes.process_start import fork_server_on_standby

            stack.enter_context(fork_server_on_standby())  # while the process is still fresh
        profiles = profile, profile_s, profile_kill
        recorded = record, record_updates, record_kill
        for observe in _observers(*profiles, measure_model, *recorded):
            stack.enter_context(observing(observe))
        from quorate.engines.processes.script import Script  # imports torch

        program = Script(str(file.resolve()), module, arguments, str(Path.cwd()), given(settings))
        if detached:
            if profile is not None or record is not None:
                fix = "leave out --profile and --record, or run it here"
                raise SettingError("detached", True, "a run that nothing is measured of", fix)
            from quorate.commands.detached import run_detached

            return run_detached(program, given(settings))
        fold_tracebacks()
        uses = _uses()
        try:
            program.run()
        except SystemExit as end:
            if end.code in (None, 0) and _uses() == uses:
                click.echo(UNUSED.format(script), err=True)
            raise
        if _uses() == uses:
            click.echo(UNUSED.format(script), err=True)
    return 0


def _uses() -> int:
    """Return how often a trainer of this process was used to train, evaluate or predict."""
    group = sys.modules.get("quorate.training.worker_group")  # None: no trainer was made
    uses: int = 0 if group is None else group.uses()
    return uses


def _may_fork(settings: Mapping[str, Any]) -> bool:
    """Return whether workers may be forked from a fork of this process.

    In a program that calls the command as a function, torch may already be imported, may have
    computed, and may have threads: such a process must not be forked.
    """
    if settings["engine"] in ("towers", "ray") or settings["workers"] == "1":
        return False
    is_new = "torch" not in sys.modules and threading.active_count() == 1
    return is_new and can_fork()


def _observers(
    profile: str | None,
    profile_s: float,
    profile_kill: bool,
    measure_model: str | None,
    record: str | None,
    record_updates: int,
    record_kill: int | None,
) -> Iterator[Observe]:
    """Yield the observers of the training loop. Absolute paths: a script may change folder."""
    if profile is not None:
        _require_new_file("profile", profile)
        real("profile_s", profile_s, above=0)
        from quorate.commands.bench.profile import profiling  # imports torch

        yield profiling(Path(profile).absolute(), profile_s, kills=profile_kill)
    if measure_model is not None:
        from quorate.commands.doctor.model.measuring import measuring  # imports torch

        _require_new_file("measure_model", measure_model)
        yield measuring(Path(measure_model).absolute())
    if record is not None:
        folder = Path(record).absolute()
        if not is_folder(folder) or any(folder.iterdir()):
            raise SettingError("record", record, "an empty folder", "make one")
        integer("record_updates", record_updates, least=1)
        from quorate.commands.verify.recorder import recording

        yield recording(folder, record_updates, record_kill)


def _require_new_file(name: str, value: str) -> None:
    """Refuse the path of a file that could not be written after all measurements.

    Raises:
        SettingError: the parent folder is missing, or a file cannot have the name.
    """
    file = Path(value).absolute()
    reason = reason_against_new_file(file) if is_folder(file.parent) else "make the folder"
    if reason is not None:
        raise SettingError(name, value, "a file in a folder", reason)
