"""Namesakes: options that a command and a script both have. Behind a script they are the command's.

That may be a surprise, so it is said. Whether the script has such an option is read off its text,
and that of the files beside it which it imports: a string that is the option's name, as it is given
to ``argparse`` or to click.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from quorate.machine.regular_file import is_file

MOST_BYTES = 1 << 20  # of a file; a larger one is not looked into
MOST_FILES = 50  # of a script and what it imports from beside it


def say_namesakes(script: str, module: str | None, command: str, behind: Sequence[str]) -> None:
    """Say which options that were taken from behind a script it may mean to be its own.

    Args:
        script: as it was typed.
        module: its name, if it is a module.
        command: "quorate run".
        behind: the options of the command that stood behind the script.
    """
    first = _file(script, module)
    for name, file in namesakes(first, behind).items():
        place = script if file == first else file.name
        click.echo(
            f"quorate: {name} behind {script} is taken as {command}'s, and {place} names one too: "
            "its own stands behind --",
            err=True,
        )


def namesakes(file: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Return those of some options that a script has too, and the file that names each.

    Args:
        file: None, or one that cannot be read or is no Python: nothing is known of it.
    """
    found: dict[str, Path] = {}
    for each, tree in _with_imports(file) if file is not None and names else ():
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        found |= {name: each for name in names if name in words and name not in found}
    return {name: found[name] for name in names if name in found}


def _with_imports(file: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield a file, and those in its folder that it imports, and they: each with its syntax."""
    files = [file]
    for each in files:  # which grows
        try:
            if each.stat().st_size > MOST_BYTES:
                continue
            tree = ast.parse(each.read_bytes())
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        yield each, tree
        beside = (file.parent / f"{name}.py" for name in _imported(tree))
        files += [new for new in beside if new not in files and is_file(new)]
        del files[MOST_FILES:]


def _imported(tree: ast.Module) -> list[str]:
    """Return the names that modules of the same folder would be imported by, each once."""
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module.rpartition(".")[2] if node.level == 0 else node.module: None}
        elif isinstance(node, ast.ImportFrom) and node.level == 1:  # from . import options
            names |= dict.fromkeys(alias.name for alias in node.names)
    return [name for name in names if "." not in name]


def _file(script: str, module: str | None) -> Path | None:
    """Return the file of a script, or of a module below the current folder; None: it is elsewhere.

    A module is not looked for by Python's own means: they import its packages.
    """
    if module is None:
        return Path(script)
    place = Path(*module.split("."))
    files = (place.with_suffix(".py"), place / "__main__.py")
    return next((file for file in files if is_file(file)), None)
