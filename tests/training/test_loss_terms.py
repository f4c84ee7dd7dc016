"""Terms of a loss: equal to plain torch over the whole batch, with the same bits on any workers."""

import json
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import front_door
from support.digests import digest_of
from support.messages import expect_error
from support.plain_loop import assert_close, plain_loop
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import LossError, NotFiniteError, SettingError

ROWS, BATCH, SHARDS, STEPS, TOKENS = 46, 18, 5, 6, 7


def sentences() -> TensorDataset:
    """Rows of tokens with classes, and a mask; some shards have no masked token."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, TOKENS, 6, generator=draw)
    mask = torch.rand(ROWS, TOKENS, generator=draw) < 0.3
    mask[:4] = False
    return TensorDataset(x, torch.randint(0, 3, (ROWS, TOKENS), generator=draw), mask)


DATA = sentences()


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(TOKENS) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.words, self.pairs = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.dropout(torch.tanh(self.norm(self.body(x.to(self.body.weight.dtype)))))
        return self.words(h), self.pairs(h.mean(1))


def terms(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    x, classes, mask = batch
    words, pairs = model(x)
    n = mask.sum()
    right = (words.argmax(-1) == classes)[mask].double()
    return {
        "loss": {
            "mlm": {"loss": F.cross_entropy(words[mask], classes[mask]), "weight": n},
            "nsp": F.cross_entropy(pairs, classes[:, 0] % 2),
        },
        "right": {"loss": right.mean(), "weight": n},
        "spread": x.std(),
    }


def whole(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of plain torch, over the rows of a batch."""
    found = terms(model, batch)["loss"]
    return found["mlm"]["loss"] + found["nsp"]


def trainer(model: Any = Net, loss: Any = terms, workers: int = 1, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.5),
        **{"engine": "towers", "shards": SHARDS, "batch_size": BATCH, "devices": "cpu"},
    }
    return front_door.trainer(model, loss, workers=workers, **defaults | options)


def fitted(*args: Any, steps: int = STEPS, **options: Any) -> Any:
    made = trainer(*args, **options)
    made.fit(DATA, steps=steps, shuffle=False)
    return made


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("optimizer", ["sgd", "lbfgs"])
def test_losses_metrics_and_parameters_are_those_of_plain_torch(
    dtype: torch.dtype, bound: float, optimizer: str
) -> None:
    make: Any = partial(torch.optim.SGD, lr=0.5)
    if optimizer == "lbfgs":
        make = partial(torch.optim.LBFGS, lr=0.5, max_iter=3)
    plain, losses = Net().to(dtype), []
    plain_loop(
        plain, make, whole, DATA, steps=STEPS, batch_size=BATCH,
        is_closure=optimizer == "lbfgs", updated=lambda _, loss: losses.append(loss),
    )  # fmt: skip
    ours = trainer(lambda: Net().to(dtype), optimizer=make, workers=2)
    reports = [*ours.updates(DATA, steps=STEPS, shuffle=False)]
    assert [report.loss for report in reports] == pytest.approx(losses, abs=bound)
    assert_close(ours.model, plain, bound)
    masked = [int(DATA.tensors[2][at : at + BATCH].sum()) for at in range(0, ROWS, BATCH)] * 2
    for report, n in zip(reports, masked, strict=True):
        found = report.metrics
        assert [*found] == ["loss", "mlm", "nsp", "right", "spread"]
        assert found["loss"] == pytest.approx(found["mlm"] + found["nsp"], abs=1e-15)
        assert report.weights["mlm"] == report.weights["right"] == n
        assert round(found["right"] * n, 9).is_integer()
    evaluated = ours.evaluate(DATA)
    expected = terms(ours.model.eval(), DATA[:])
    assert evaluated["loss"] == pytest.approx(whole(ours.model, DATA[:]).item(), abs=bound)
    assert evaluated["right"] == pytest.approx(expected["right"]["loss"].item(), abs=1e-15)


def test_a_shard_that_another_tower_has_computed_too_counts_once() -> None:
    calls = count()

    def late(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        if threading.current_thread().name.endswith("-0") and next(calls) % 7 == 6:
            time.sleep(0.05)  # in a run of shards: the other tower computes copies
        return terms(model, batch)

    one, two = (fitted(loss=late, workers=n, steps=40, shards=8) for n in (1, 2))
    assert digest_of(one) == digest_of(two)


def test_one_digest_on_any_workers_and_after_a_resume_with_curves(tmp_path: Path) -> None:
    """Dropout and BatchNorm: both passes have the same random numbers, and count once."""
    model, options = partial(Net, 0.3, norm=True), {"ema_decay": 0.9, "clip_norm": 0.5}
    expected = fitted(model, **options)
    assert expected.model.norm.num_batches_tracked == STEPS
    run = {"run_dir": tmp_path / "run", "keep": 1}
    fitted(model, workers=3, steps=4, **options, **run)
    resumed = fitted(model, workers=2, **options, **run)
    assert digest_of(resumed) == digest_of(expected)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {"loss", "mlm", "nsp", "right"} <= json.loads(lines[-1]).keys()


def test_a_second_pass_is_made_only_where_totals_differ() -> None:
    calls = [0]

    def count(change: Any, **options: Any) -> int:
        def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
            calls[0] += model.training
            return change(terms(model, batch))

        made = trainer(loss=loss, spot_check_every=0, **options)
        for report in made.updates(DATA, steps=4, shuffle=False):
            if report.global_step == 2:
                calls[0] = 0
        return calls[0]

    def of_one_weight(found: dict[str, Any]) -> dict[str, Any]:
        n = found["right"]["weight"]
        return {"loss": {name: {"loss": found["loss"]["nsp"], "weight": n} for name in "ab"}}

    assert count(lambda found: found) == 2 * 2 * SHARDS
    assert count(of_one_weight) == 2 * SHARDS
    assert count(lambda found: {"loss": {"nsp": found["loss"]["nsp"]}}) == 2 * SHARDS
    assert count(lambda found: found, shards=1) == 2
    assert count(lambda found: found, update="async") == 2  # each shard is an update


def test_terms_may_be_absent_or_over_nothing() -> None:
    """A term that some shards leave out has the total of the others; without a total, it is 0."""

    def sparse(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        found = terms(model, batch)
        if not batch[2].any():
            del found["loss"]["mlm"], found["right"]
        found["loss"]["none"] = {"loss": found["spread"] * float("nan"), "weight": 0}
        return found

    ours = trainer(loss=sparse)
    reports = [*ours.updates(DATA, steps=STEPS, shuffle=False)]
    assert digest_of(ours) == digest_of(fitted())
    assert [report.metrics["none"] for report in reports] == [0.0] * STEPS
    empty = trainer(loss=lambda m, b: {"loss": {"a": {"loss": whole(m, b), "weight": 0}}})
    with expect_error(LossError, name="weight"):
        empty.fit(DATA, steps=1)


def of_part(name: str) -> Any:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        x, _, mask = batch
        squares = model[name](x).square()  # type: ignore[index]
        if name == "words":
            return {"loss": squares.mean(), "weight": len(x)}
        masked = {"loss": squares[mask].mean(), "weight": mask.sum()}
        return {"loss": {"masked": masked, "size": squares.mean()}}

    return loss


def test_a_gather_and_a_phase_may_return_terms() -> None:
    def represent(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, classes, mask = batch
        return (*model(x), classes, mask)

    def contrast(_: nn.Module, found: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        words, pairs, classes, mask = found
        return terms(lambda _: (words, pairs), [words, classes, mask])  # type: ignore[arg-type]

    plain = fitted()
    gathered = fitted(loss=quorate.Gather(represent, contrast))
    assert_close(gathered.model, plain.model, 1e-6)
    expected, found = plain.evaluate(DATA), gathered.evaluate(DATA)
    assert found["mlm"] == pytest.approx(expected["mlm"], abs=1e-6)
    names = ("body", "words")
    made = quorate.Trainer(
        {name: partial(nn.Linear, 6, 3) for name in names},
        {name: of_part(name) for name in names},
        optimizer={name: partial(torch.optim.SGD, lr=0.1) for name in names},
        batch_size=BATCH,
        shards=SHARDS,
        devices="cpu",
    )
    made.fit(DATA, steps=4, shuffle=False)
    found = made.evaluate(DATA)
    assert found["body/loss"] == pytest.approx(found["body/masked"] + found["body/size"], abs=1e-12)
    body = made.model["body"](DATA.tensors[0])
    assert found["body/masked"] == pytest.approx(body[DATA.tensors[2]].square().mean().item())


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_term_that_is_not_finite_makes_no_update(nonfinite: str) -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        found = terms(model, batch)
        if model.training and (batch[0] == DATA.tensors[0][5]).flatten(1).all(1).any():
            found["loss"]["mlm"]["loss"] = found["loss"]["mlm"]["loss"] / 0.0
        return found

    ours = trainer(loss=loss, nonfinite=nonfinite)
    if nonfinite == "stop":
        with expect_error(NotFiniteError):
            ours.fit(DATA, steps=2, shuffle=False)
    else:
        reports = [*ours.updates(DATA, steps=4, shuffle=False)]
        assert [report.not_finite for report in reports] == [1, 1, 1, 2]


def test_fp16_and_a_sum_among_terms(capsys: pytest.CaptureFixture[str]) -> None:
    narrow, wide = fitted(precision="fp16"), fitted()
    assert_close(narrow.model, wide.model, 5e-3)

    def summed(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        found = terms(model, batch)
        found["loss"]["pairs"] = model(batch[0])[1].square().sum()
        return found

    fitted(loss=summed, steps=1)
    assert "term 'pairs' of the loss is a sum over the rows" in capsys.readouterr().out


WRONG: list[tuple[str, Any]] = [
    ("loss", {}),
    ("loss", {"loss": torch.zeros(())}),
    ("term 'a'", {"a": torch.zeros(2)}),
    ("term 'a'", {"a": {"loss": torch.zeros(())}}),
    ("metric 'right'", {"right": torch.zeros((), requires_grad=True)}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=[f"{n}" for n in range(len(WRONG))])
def test_mistakes_are_said_in_a_line(name: str, wrong: Any) -> None:
    with expect_error(LossError, name=name):
        trainer(loss=lambda m, b: {**terms(m, b), "loss": wrong}).fit(DATA, steps=1)


def test_weights_that_change_or_are_missing_are_said_in_a_line() -> None:
    calls = [0]

    def fickle(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        found = terms(model, batch)
        calls[0] += 1
        found["loss"]["mlm"]["weight"] = calls[0]
        return found

    def odd(model: nn.Module, batch: list[torch.Tensor]) -> Any:
        return terms(model, batch) if batch[2].any() else whole(model, batch)

    with expect_error(LossError, name="the weight of term 'mlm'", hide=r"\d+"):
        trainer(loss=fickle).fit(DATA, steps=1, shuffle=False)
    with expect_error(LossError, name="loss"):
        trainer(loss=odd).fit(DATA, steps=1, shuffle=False)
    with expect_error(SettingError, name="update", got="quorum:3"):
        trainer(workers=2, update="quorum:3").fit(DATA, steps=1, shuffle=False)
