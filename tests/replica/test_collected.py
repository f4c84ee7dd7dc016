"""Values collected in evaluations: outputs of all rows, and states of metrics, in their order."""

from typing import Any

import pytest
import torch
from support import front_door
from support.fits import sgd
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import LossError, OutputError, SettingError

ROWS = 61
DATA = TensorDataset(
    torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)), torch.arange(ROWS) % 3
)


def area(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Area under the ROC curve: how many pairs are in their order."""
    above, below = scores[labels], scores[~labels]
    pairs = (above[:, None] > below).double() + 0.5 * (above[:, None] == below)
    return pairs.mean()


def trainer(loss: Any, totals: dict[str, Any], workers: int) -> quorate.Trainer:
    shape: dict[str, Any] = {"batch_size": 16, "shards": 4, "devices": "cpu", "engine": "towers"}
    options = {"optimizer": sgd, "workers": workers, "totals": totals}
    return front_door.trainer(lambda: nn.Linear(4, 3), loss, **shape, **options)


def with_outputs(names: dict[str, Any]) -> Any:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        logits = model(batch[0])
        found = {"loss": nn.functional.cross_entropy(logits, batch[1])}
        return found | {name: output(logits, batch[1]) for name, output in names.items()}

    return loss


def test_a_function_of_all_rows_is_that_of_the_whole_on_any_workers() -> None:
    outputs = {
        "area": lambda logits, y: (logits[:, 0], y == 0),
        "rank": lambda logits, _: logits[:, 1],
        "words": lambda _, y: [f"{int(n)}" for n in y],
    }
    totals = {
        "area": quorate.Collect(area),
        "rank": quorate.Collect(
            lambda x: {"median": x.median(), "inversions": (x[1:] < x[:-1]).sum()}
        ),
        "words": quorate.Collect(lambda words: len("".join(words))),
    }
    found = []
    for workers in (1, 3):
        made = trainer(with_outputs(outputs), totals, workers)
        made.fit(DATA, epochs=1, validation=quorate.Validation(DATA, best="max:area"))
        found.append(made.evaluate(DATA))
        logits, y = made.predict(DATA), DATA.tensors[1]
        assert found[-1]["area"] == float(area(logits[:, 0], y == 0))
        assert found[-1]["median"] == float(logits[:, 1].median())
        assert found[-1]["inversions"] == int((logits[1:, 1] < logits[:-1, 1]).sum())
        assert found[-1]["words"] == ROWS
    assert found[0] == found[1]
    assert 0 < found[0]["area"] < 1


# torchmetrics's names of its reductions: quorate knows the reductions by name.
def dim_zero_sum(states: torch.Tensor) -> torch.Tensor:
    return states.sum(0)


def dim_zero_cat(states: Any) -> torch.Tensor:
    return torch.cat(states)


def dim_zero_mean(states: torch.Tensor) -> torch.Tensor:
    return states.mean(0)


class Spread(nn.Module):
    """A metric with states and reductions as declared by torchmetrics."""

    def __init__(self, reduction: Any = dim_zero_sum, keeps: bool = False) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(()), "values": []}
        self._reductions = {"total": reduction, "values": dim_zero_cat}
        self._keeps = keeps
        self.reset()

    def reset(self) -> None:
        self.total, self.values = torch.zeros((), dtype=torch.float64), list[torch.Tensor]()

    def update(self, values: torch.Tensor) -> None:
        self.total = self.total + values.double().sum()
        self.values.append(values)
        if self._keeps:
            self.mode = "seen"

    def compute(self) -> dict[str, torch.Tensor]:
        values = torch.cat(self.values)
        return {"sum": self.total, "most": values.max(), "first": values[0], "rows": len(values)}


def test_states_are_merged_in_the_order_of_rows() -> None:
    output = {"spread": lambda logits, _: logits[:, 0]}
    mine = Spread()
    found = []
    for workers in (1, 3):
        made = trainer(with_outputs(output), {"spread": mine}, workers)
        found.append(made.evaluate(DATA))
        logits = made.predict(DATA)[:, 0]
        assert found[-1]["sum"] == pytest.approx(float(logits.double().sum()))
        assert found[-1]["most"] == float(logits.max())
        assert found[-1]["first"] == float(logits[0])
        assert found[-1]["rows"] == ROWS
    assert found[0] == found[1]
    assert mine.values == [], "the user's own is never updated"


def test_metrics_that_cannot_be_merged_are_refused() -> None:
    with expect_error(
        SettingError, name="totals['spread']", got="Spread, with total by dim_zero_mean"
    ):
        trainer(with_outputs({}), {"spread": Spread(dim_zero_mean)}, 1)
    empty = Spread()
    empty._reductions = {}
    with expect_error(SettingError, name="totals['spread']", got="Spread, which has none"):
        trainer(with_outputs({}), {"spread": empty}, 1)
    output = {"spread": lambda logits, _: logits[:, 0]}
    made = trainer(with_outputs(output), {"spread": Spread(keeps=True)}, 1)
    with expect_error(OutputError, name="total 'spread'"):
        made.evaluate(DATA)


MISTAKES: dict[str, tuple[Any, Any]] = {
    "mean": (lambda logits, _: logits.mean(), quorate.Collect(lambda x: 0.0)),
    "taken": (lambda logits, _: logits, quorate.Collect(lambda x: {"loss": 1.0})),
    "raises": (lambda logits, _: logits, quorate.Collect(lambda x: 1 / 0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    output, total = MISTAKES[mistake]
    made = trainer(with_outputs({"x": output}), {"x": total}, 2)
    if mistake == "raises":
        with pytest.raises(ZeroDivisionError) as raised:
            made.evaluate(DATA)
        assert "quorate: in totals['x'], of 61 rows" in raised.value.__notes__
        return
    with expect_error(OutputError if mistake == "mean" else LossError):
        made.evaluate(DATA)
