"""Options of a command behind its script: ``quorate verify train.py --workers 1,2``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

EPILOG = (
    "Options stand before the script, or right after it; then all that follows the first word that "
    "is none of them is the script's, and so is all after --."
)


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script and its arguments, behind the command's own options."""
    parser.add_argument("script", help="a Python file that trains with quorate.Trainer")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")


def take_options(
    options: argparse.Namespace, add_options: Callable[[argparse.ArgumentParser], None], prog: str
) -> None:
    """Move the command's options from behind the script, if there are none before it.

    Args:
        add_options: adds them to a parser; each is None if it is not given.
        prog: the command, for messages.
    """
    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False)
    add_options(parser)
    actions = {name: action for action in parser._actions for name in action.option_strings}
    arguments: list[str] = options.arguments
    if all(getattr(options, action.dest) is None for action in actions.values()):
        end = 0
        while end < len(arguments) and arguments[end].partition("=")[0] in actions:
            name, is_whole, _ = arguments[end].partition("=")
            end += 1 if is_whole or actions[name].nargs == 0 else 2
        parser.parse_args(arguments[:end], namespace=options)
        arguments = arguments[end:]
    options.arguments = arguments[1:] if arguments[:1] == ["--"] else arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
