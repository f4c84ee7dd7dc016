"""The ``quorate`` command: ``run`` a script, ``inspect`` a run. One file per subcommand."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from quorate.errors import NotFiniteError, UserError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; exit code 2 as everywhere."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's entry point; returns the exit code."""
    from quorate.cli import inspect, run

    parser = Parser(prog="quorate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="run | inspect")
    for module in (run, inspect):
        module.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.call(options)
    except UserError as error:
        print(f"quorate: {error}", file=sys.stderr)
        code = 2
    except NotFiniteError as error:  # no traceback says more than the message
        print(f"quorate: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:  # the run has said what it saved
        code = 128 + signal.SIGINT
    return code
