"""What the tests of examples/segmentation have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.example_modules import EXAMPLES, example_modules


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Its files."""
    with example_modules(EXAMPLES / "segmentation") as files:
        yield files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUORATE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"
