"""Models in stages as people write them: the bits of one piece, or a line with the reason."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from support.digests import digest_of
from support.fits import fit
from support.messages import expect_error
from support.staged_models import CASES, Case, Nests, Rows, Told, WritesEarlier
from torch import nn
from torch.utils._pytree import tree_leaves

from quorate.errors import CutError

X = torch.Tensor


def total(output: Any) -> torch.Tensor:
    """Return a loss: mean squares of all floats returned by a model."""
    floats = [t for t in tree_leaves(output) if isinstance(t, X) and t.is_floating_point()]
    return torch.stack([tensor.float().square().mean() for tensor in floats]).sum()


def trained(case: Case, pipeline: str | None = "1f1b") -> tuple[str, float]:
    """Train in stages in the given order, or in one piece; return digest, and an evaluation's loss.

    Each update has two shards, and the last update has shorter shards.
    """
    devices = "+".join(["cpu"] * (len(case.split) + 1))
    staged = {"devices": devices, "split": case.split, "pipeline": pipeline} if pipeline else {}
    settings = {"batch_size": 8, "shards": 2, "epochs": 1, "workers": 1, "ema_decay": 0.9}
    trainer = fit(
        *(case.model, lambda model, batch: total(case.call(model, batch)), Rows()),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        **settings | staged,
    )
    return digest_of(trainer), trainer.evaluate(Rows(7))["loss"]


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_one_piece(name: str, request: pytest.FixtureRequest) -> None:
    whole = trained(CASES[name], None)
    assert trained(CASES[name], "1f1b") == whole
    request.getfixturevalue("in_threads")
    assert trained(CASES[name], "zero-bubble") == whole


# --- operations that stages would do differently --------------------------------------------------


def sets(module: Any, x: X) -> X:
    module.calls += 1
    return x


def closes_over(_: nn.Module, x: X) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda y: y + x, x.sin(), use_reentrant=False)


def lowered(module: Any, x: X) -> X:
    with torch.autocast("cpu", torch.bfloat16):
        lower: X = module.a(x).float()
    return lower


def told(does: Callable[[Any, X], Any]) -> Case:
    return Case(lambda: Told(does), ["b"])


def one_norm_twice() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)


REFUSED = {
    "an attribute is set": told(sets),
    "Python's draws": told(lambda _, x: x * random.random()),
    "numpy's draws": told(lambda _, x: x * np.random.rand()),
    "precision of its own": told(lowered),
    "a checkpoint with more": told(closes_over),
    "written and read": Case(WritesEarlier, ["b", "c"]),
    "buffers of two stages": Case(one_norm_twice, ["2"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_would_not_do_is_refused(name: str) -> None:
    with expect_error(CutError, name="split"):
        trained(REFUSED[name])


def branches(_: nn.Module, x: X) -> X:
    return x * 2 if x.sum() > 0 else x


def loops(_: nn.Module, x: X) -> X:
    for row in range(x.shape[0]):
        x = x + row
    return x


def with_mask_later(model: nn.Module, batch: Any) -> Any:
    mask = batch["x"] if len(batch["x"]) < 4 else None  # in the last update
    return model({"x": batch["x"]}, [batch["x"]], mask=mask)


LATER = {
    "a branch": Case(lambda: Told(branches), ["b"], lambda m, b: m(b["x"] * 9)),
    "a loop": told(loops),
    "an argument": Case(Nests, ["last"], with_mask_later),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.usefixtures("way")
def test_a_shard_that_goes_another_way_is_found_out(name: str) -> None:
    with expect_error(CutError, name="split") as raised:
        trained(LATER[name])
    assert "models" in str(raised.value).split(".py, line")[0] or name == "an argument"
    assert "stage 0 of 2 (the first modules)" in "\n".join(raised.value.__notes__)
