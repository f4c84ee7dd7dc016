"""Namesakes: options of a command that a script has too. After a script they are the command's.

The user may expect otherwise, so a warning is printed. Whether the script has such an option is
decided from the source of the script and of the files beside it that the script imports: from a
string that is the option's name, as passed to ``argparse`` or to click.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from quorate.machine.regular_file import is_file

MOST_BYTES = 1 << 20  # of a file; a larger file is not searched
MOST_FILES = 50  # a script and its imports from the same folder


def say_namesakes(script: str, module: str | None, command: str, behind: Sequence[str]) -> None:
    """Warn about options taken from behind a script that the script may have too.

    Args:
        script: the script, as typed.
        module: name of the module, if the program is a module.
        command: "quorate run".
        behind: the options of the command behind the script.
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
    """Return the options that a script has too, each with the file that contains its name.

    Args:
        file: the script; None, an unreadable file and a file other than Python give no result.
    """
    found: dict[str, Path] = {}
    for each, tree in _with_imports(file) if file is not None and names else ():
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        found |= {name: each for name in names if name in words and name not in found}
    return {name: found[name] for name in names if name in found}


def _with_imports(file: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the syntax tree of a file and, recursively, of its imports from the same folder."""
    files = [file]
    for each in files:  # the list grows
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
    """Return the names of modules possibly imported from the same folder, without duplicates."""
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
    """Return the file of a script, or of a module below the current folder; None: elsewhere.

    Python's own search for modules is not used, because it imports the packages of a module.
    """
    if module is None:
        return Path(script)
    place = Path(*module.split("."))
    files = (place.with_suffix(".py"), place / "__main__.py")
    return next((file for file in files if is_file(file)), None)
