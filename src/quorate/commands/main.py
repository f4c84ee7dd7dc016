"""The ``quorate`` command. One file per subcommand: ``run`` a script, ``inspect`` a run, ..."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Sequence

import click

import quorate
from quorate.commands.command import TO_COPY, Commands, usage_line
from quorate.errors import OneLineError
from quorate.machine.environment import wants_full_tracebacks
from quorate.machine.standard_streams import steady

OK, MISTAKE = 0, 2
INTERRUPTED = 128 + signal.SIGINT  # and 128 + signal.SIGTERM, with which the run itself exits

SECTIONS = {
    "Exit codes": [
        ("0", "success; verify: the same bits; doctor: a run would work"),
        ("1", "the run failed; verify: a difference was found; doctor: a run would fail"),
        ("2", "a mistake that you can correct, reported in one line; verify: --limit was reached"),
        ("130", "ended by Ctrl-C (143: by SIGTERM); a run saves its state first"),
    ],
    TO_COPY: [
        ("bash", 'eval "$(_QUORATE_COMPLETE=bash_source quorate)"'),
        ("zsh", 'eval "$(_QUORATE_COMPLETE=zsh_source quorate)"'),
        ("fish", "_QUORATE_COMPLETE=fish_source quorate | source"),
    ],
    "Environment": [
        ("NO_COLOR", "show no colours, if set"),
        ("QUORATE_TRACEBACK", "set to full to show all frames of a traceback"),
    ],
}

_version = click.version_option(
    quorate.__version__, prog_name="quorate", message="%(prog)s %(version)s"
)
commands = _version(
    Commands(
        "quorate",
        {
            "run": "quorate.commands.run",
            "runs": "quorate.commands.runs",
            "inspect": "quorate.commands.inspect",
            "report": "quorate.commands.report.command",
            "verify": "quorate.commands.verify.command",
            "bench": "quorate.commands.bench.command",
            "plan": "quorate.commands.plan.command",
            "doctor": "quorate.commands.doctor.command",
            "convert": "quorate.commands.convert",
        },
        SECTIONS,
        help="Train a PyTorch model on every device you have. The weights are the same, bit for "
        "bit, on any number of devices.",
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse a command line, carry out the command, and return the exit code.

    Args:
        arguments: the words after ``quorate``; None: the arguments of this process.
    """
    with steady():
        return _ended(arguments)


def _ended(arguments: Sequence[str] | None) -> int:
    try:
        call = _read(arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # "quorate" alone: the list of commands, on standard error
        return MISTAKE
    except click.ClickException as error:
        return _told(usage_line(error), MISTAKE)
    except click.Abort:
        return INTERRUPTED
    try:
        return call()
    except OneLineError as error:
        if wants_full_tracebacks():
            traceback.print_exception(error)
        return _told(error.line, error.exit_code)
    except KeyboardInterrupt:  # the run has already printed what was saved
        return INTERRUPTED


def _read(arguments: Sequence[str] | None) -> Callable[[], int]:
    words = None if arguments is None else list(arguments)
    read = commands.main(words, "quorate", standalone_mode=False, windows_expand_args=False)
    return read if callable(read) else lambda: OK  # --help and --version have already been printed


def _told(line: str, code: int) -> int:
    click.echo(line, err=True)
    return code
