"""The files of an example, imported under their own names, which other examples use too."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def example_modules(folder: Path) -> Iterator[SimpleNamespace]:
    """Yield all files of an example by name: ``data`` is the example's only within the block."""
    names = sorted(path.stem for path in folder.glob("*.py"))
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def main(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run a program; return the exit code."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    try:
        module.main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 2
    return 0
