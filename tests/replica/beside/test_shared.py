"""``Shared``: what can be in it, and how it is read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.messages import expect_error
from torch import nn

import quorate
from quorate.errors import SharedError


def test_values_are_attributes_and_items() -> None:
    shared = quorate.Shared("a", beta=0.5, note="x", nothing=None, mean=torch.zeros(2))
    shared.beta = np.float32(0.25)
    shared["note"] = "y"
    assert (shared.beta, shared["note"], shared.nothing) == (0.25, "y", None)
    assert type(shared.beta) is float
    assert [*shared] == ["beta", "note", "nothing", "mean"]
    assert len(shared) == 4
    assert "beta" in shared
    assert repr(shared) == "Shared('a', beta, note, nothing, mean)"


def test_a_tensor_that_wants_a_gradient_is_held_without() -> None:
    assert not quorate.Shared("a", mean=nn.Parameter(torch.ones(2))).mean.requires_grad


@pytest.mark.parametrize(
    "make",
    [
        lambda: quorate.Shared("a b"),
        lambda: quorate.Shared("_a"),
        lambda: quorate.Shared("a", _b=1),
        lambda: quorate.Shared("a", b=[1]),
        lambda: quorate.Shared("a", b=torch.eye(2).to_sparse()),
        lambda: setattr(quorate.Shared("a", b=1), "c", 1),
        lambda: setattr(quorate.Shared("a", b=1), "b", torch.ones(1)),
        lambda: setattr(quorate.Shared("a", b=torch.ones(1)), "b", 1),
        lambda: setattr(quorate.Shared("a", b=nn.Linear(1, 1)), "b", nn.Linear(1, 1)),
        lambda: delattr(quorate.Shared("a", b=1), "b"),
        lambda: pickle.dumps(quorate.Shared("a", b=1)),
    ],
)
def test_what_cannot_be_is_one_line(make: Callable[[], object]) -> None:
    with expect_error(SharedError) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_what_is_not_there_is_missing_as_python_says() -> None:
    shared = quorate.Shared("a", beta=0.5)
    with pytest.raises(AttributeError, match="has beta, and no 'gamma'"):
        _ = shared.gamma
    with pytest.raises(KeyError, match="gamma"):
        _ = shared["gamma"]
    assert not hasattr(shared, "gamma")


def test_a_copy_of_what_holds_it_reads_the_same() -> None:
    shared = quorate.Shared("a", beta=0.5)
    held = {"anneal": shared}
    assert copy.deepcopy(held)["anneal"] is copy.copy(shared) is shared
