"""Former DDP scripts: the same bits everywhere, or a line with the name of the call."""

import os
import sys

import pytest
import torch.distributed
from support.former_ddp import FORMER, ONE_TOWER, SAME, TORCHRUN, WAYS, WRONG, outcomes

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked"),
]
# Guarded code, the environment's facts, a call; all cases in all ways with this variable.
IS_ALL = "QUORATE_TEST_FORMER_DDP" in os.environ
CHOSEN = {
    "loss_divided_by_guarded_world_size": ["2 ranks", TORCHRUN],
    "rank_read_in_the_loss": [TORCHRUN],
    "barrier_in_the_loss": ["2 processes", "2 ranks"],
}


@pytest.mark.parametrize("name", FORMER)
def test_a_call_is_named_with_its_line_and_a_cure(name: str) -> None:
    case = FORMER[name]
    found = outcomes(case, [ONE_TOWER])[ONE_TOWER]
    assert found.kind != WRONG, found.text
    assert (found.kind == SAME) == (not case.names), found.text
    if case.names.endswith("()"):
        assert f"{case.names} (script.py:" in found.text
        assert "leave it out" in found.text or "give Trainer the model itself" in found.text


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMER if IS_ALL else CHOSEN)
def test_nothing_hangs_and_nothing_is_silent(name: str) -> None:
    found = outcomes(FORMER[name], WAYS if IS_ALL else CHOSEN[name])
    assert {way: o for way, o in found.items() if o.kind == WRONG} == {}
