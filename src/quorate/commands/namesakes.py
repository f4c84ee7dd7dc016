"""Namesakes: options that a command and a script both have. Behind a script they are the command's.

That may be a surprise, so it is said. Whether the script has such an option is read off its text: a
string that is the option's name, as it is given to ``argparse`` or to click.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import click

MOST_BYTES = 1 << 20  # of a script; a larger one is not looked into


def say_namesakes(script: str, module: str | None, command: str, behind: Sequence[str]) -> None:
    """Say which options that were taken from behind a script it may mean to be its own.

    Args:
        script: as it was typed.
        module: its name, if it is a module.
        command: "quorate run".
        behind: the options of the command that stood behind the script.
    """
    own = namesakes(_file(script, module), behind)
    for name in own:
        click.echo(
            f"quorate: {name} behind {script} is taken as {command}'s, and {script} names one too: "
            "its own stands behind --",
            err=True,
        )


def namesakes(file: Path | None, names: Sequence[str]) -> list[str]:
    """Return those of some options that a script has too, each once.

    Args:
        file: None, or one that cannot be read or is no Python: nothing is known of it.
    """
    try:
        if file is None or file.stat().st_size > MOST_BYTES:
            return []
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return [name for name in dict.fromkeys(names) if name in words]


def _file(script: str, module: str | None) -> Path | None:
    """Return the file of a script, or of a module below the current folder; None: it is elsewhere.

    A module is not looked for by Python's own means: they import its packages.
    """
    if module is None:
        return Path(script)
    place = Path(*module.split("."))
    files = (place.with_suffix(".py"), place / "__main__.py")
    return next((file for file in files if file.is_file()), None)
