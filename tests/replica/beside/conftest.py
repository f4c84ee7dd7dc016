"""What tests of values beside the model have in common."""

from __future__ import annotations

from weakref import WeakValueDictionary

import pytest

from quorate.replica.beside import shared as shared_values


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have none of a test before, which a traceback may hold."""
    monkeypatch.setattr(shared_values, "_known", WeakValueDictionary())
