"""The ``quorate`` command. One file per subcommand: ``run`` a script, ``inspect`` a run, ..."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from quorate.errors import NotFiniteError, RunError, UserError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; exit code 2 as everywhere."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's entry point; returns the exit code."""
    from quorate.commands import convert, inspect, run
    from quorate.commands.bench import command as bench
    from quorate.commands.doctor import command as doctor
    from quorate.commands.verify import command as verify

    parser = Parser(prog="quorate", description=__doc__)
    metavar = "run | inspect | verify | bench | doctor | convert"
    commands = parser.add_subparsers(dest="command", required=True, metavar=metavar)
    for module in (run, inspect, verify, bench, doctor, convert):
        module.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.call(options)
    except UserError as error:
        print(f"quorate: {error}", file=sys.stderr)
        code = 2
    except (NotFiniteError, RunError) as error:  # no traceback says more than the message
        print(f"quorate: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:  # the run has said what it saved
        code = 128 + signal.SIGINT
    return code
