"""Modules of the package: the public modules, and the modules imported by a Python file."""

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import quorate

PACKAGE = Path(quorate.__file__).parent

# Names in docs/, with all modules below: tests may import these. Others: white_box.txt.
PUBLIC = (
    *("quorate.__main__", "quorate.errors", "quorate.callbacks", "quorate.testing"),
    *("quorate.data.at", "quorate.data.streams", "quorate.data.tfrecord", "quorate.data.images"),
    *("quorate.data.tokens", "quorate.data.cache_dir", "quorate.data.labelled_images"),
    *("quorate.data.idx", "quorate.simulation.inputs", "quorate.simulation.prediction"),
    # The seam of engines, see docs/reference/testing.md.
    *("quorate.engines.job", "quorate.engines.worker_status"),
    "quorate.coordination.protocol",
)
PUBLIC_PACKAGES = ("quorate", "quorate.engines", "quorate.data", "quorate.simulation")


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_public(module: str) -> bool:
    """Return whether a module of the package keeps its name in any design."""
    of_public = any(module == name or module.startswith(f"{name}.") for name in PUBLIC)
    return of_public or module in PUBLIC_PACKAGES


def imported(path: Path, skipped: Collection[ast.AST] = ()) -> Iterator[str]:
    """Yield the modules of the package imported by a file, anywhere but in skipped nodes."""
    for node in ast.walk(parsed(path)):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in below)


def top_modules(path: Path) -> set[str]:
    """Return the first names of all modules imported by a file; ``.`` for relative imports."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module).partition(".")[0])
    return names
