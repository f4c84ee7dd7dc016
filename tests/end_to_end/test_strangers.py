"""Trainings as strangers write them: the same bits and the right values, or it is said why not.

All of them: ``python -m support.strangers`` in ``tests``, or with words that are in their names.
"""

from __future__ import annotations

import os

import pytest
from support.strangers import catalogue, is_right, judged

CASES = catalogue()
EVERY = int(os.environ.get("QUORATE_TEST_STRANGERS", "27"))  # of so many cases one; 1: all of them


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES)[::EVERY])
def test_nothing_is_silent(name: str) -> None:
    case = CASES[name]
    verdict = judged(name, case.options, has_plain=case.plain)
    assert is_right(case, verdict), f"{verdict.kind}: {verdict.why}"
