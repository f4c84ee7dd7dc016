"""The program for a command: a script by path, or a module by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from quorate.errors import SettingError, cure
from quorate.machine.regular_file import is_file, is_folder


def require_program(script: str, module: str | None) -> Path:
    """Return the file of a script, or of the module in its place. Imports nothing.

    Not even a module's packages are imported, as by ``importlib.util.find_spec``: their
    computations must run after the seeding, once, in this process as in each worker.

    Raises:
        SettingError: the program does not exist.
    """
    if module is not None:
        return _file_of(module)
    file = Path(script)
    if not is_file(file):
        beside = [path.name for path in _scripts_in(file.parent)]
        raise SettingError("script", script, "a Python file", _fix(file, beside))
    return file


def _fix(file: Path, beside: Sequence[str]) -> str:
    if is_folder(file):
        return f"it is a folder: name a file in it, such as {file / (beside or ['train.py'])[0]}"
    return cure(file.name, beside, "check the path")


def _scripts_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*.py"))
    except OSError:
        return []


def _file_of(module: str) -> Path:
    spec, package = _spec_of(module), False
    if spec is not None and spec.submodule_search_locations is not None:
        package = True
        spec = PathFinder.find_spec("__main__", [*spec.submodule_search_locations])
    if spec is not None and spec.has_location and spec.origin is not None:
        return Path(spec.origin)
    expected = "a module that is found from this folder"
    fix = "give its name with dots, and be in the folder that its first package is in"
    if package:
        fix = "it is a package without a __main__.py: name a module in it"
    elif module.endswith(".py") or "/" in module:
        fix = "that is a path: leave out -m"
    raise SettingError("-m", module, expected, fix)


def _spec_of(module: str) -> ModuleSpec | None:
    """Return the spec of a module, found from this folder or in Python's usual way."""
    first, *rest = module.split(".")
    try:
        spec = PathFinder.find_spec(first, [str(Path.cwd())]) or find_spec(first)
        for name in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = PathFinder.find_spec(name, [*spec.submodule_search_locations])
    except (ImportError, ValueError):  # an empty name
        return None
    return spec
