"""Fixtures common to the tests of commands."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_fonts_left() -> Iterator[None]:
    """Close fonts: matplotlib keeps the files open."""
    yield
    if (fonts := sys.modules.get("matplotlib.font_manager")) is not None:
        fonts._get_font.cache_clear()
