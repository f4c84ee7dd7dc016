"""The page of mistakes in scripts: each mistake is made, and the output is the page's line."""

import runpy
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "docs" / "mistakes.py"
MISTAKES = {mistake.what: mistake for mistake in runpy.run_path(str(FILE))["mistakes"]()}
LATE = "The gradient is not finite"  # found only by an update


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_told_in_the_line_of_the_page(what: str) -> None:
    assert MISTAKES[what].made() == (MISTAKES[what].line, 1 if what == LATE else 2)
