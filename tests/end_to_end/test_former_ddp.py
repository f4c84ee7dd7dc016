"""Scripts that trained with DDP: the same bits everywhere, or one line that names the call.

All of them: ``python -m support.former_ddp`` in ``tests``, or with words that are in their names.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch.distributed
from support.former_ddp import WRONG, cases, outcomes

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked"),
]
CASES = cases()
EVERY = int(os.environ.get("QUORATE_TEST_FORMER_DDP", "25"))  # of so many cases one; 1: all


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES][::EVERY])
def test_nothing_hangs_and_nothing_is_silent(name: str) -> None:
    found = outcomes(CASES[name])
    assert {way: o for way, o in found.items() if o.kind == WRONG} == {}
