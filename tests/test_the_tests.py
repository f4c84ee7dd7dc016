"""The tests themselves: a folder for each room, what they share in support, no leak unseen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quorate

TESTS = Path(__file__).parent
ROOMS = {path.parent.name for path in Path(quorate.__file__).parent.glob("*/__init__.py")}
# Whole runs; programs beside the package; code that tests share; scripts; digests; pytest's own.
BESIDE_ROOMS = {
    *("end_to_end", "examples", "support", "scripts", "strangers", "golden"),
    "__pycache__",
}


def imported_by(path: Path) -> set[str]:
    """All modules that a file imports anywhere, by their first names; relative ones as ``.``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module).partition(".")[0])
    return names


def test_each_room_has_its_folder() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - BESIDE_ROOMS
    assert folders == ROOMS


def test_a_test_imports_from_support_and_never_from_a_test() -> None:
    wrong = {
        (str(path.relative_to(TESTS)), name)
        for path in TESTS.rglob("*.py")
        for name in imported_by(path)
        if name.startswith("test_") or name in {".", "tests", "conftest"}
    }
    assert wrong == set()


def test_every_test_is_watched_for_leaks(request: pytest.FixtureRequest) -> None:
    unwatched = {
        item.nodeid
        for item in request.session.items
        if "nothing_is_left" not in getattr(item, "fixturenames", ())
    }
    assert unwatched == set()
