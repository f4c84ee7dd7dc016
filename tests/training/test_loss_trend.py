"""A validation loss that rises is said at the end of a fit, and a steady or noisy one is not."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import quorate
from quorate.training.validation import LossTrend


@pytest.mark.parametrize(
    ("losses", "lowest"),
    [
        ([6.5, 5.9, 6.6, 7.4, 8.1], "epoch 2 (5.9000)"),
        ([1.0, 1.2, 1.3], "epoch 1 (1.0000)"),
        ([3.0, 2.0, 1.0, 0.9], None),  # falls
        ([1.0, 1.01, 1.02, 1.03], None),  # noise
        ([2.0, 1.0, 3.0], None),  # one bad evaluation behind the best is no trend
        ([1.0], None),
        ([], None),
        ([1.0, 1.0, float("nan")], None),
    ],
)
def test_a_rise_from_the_lowest_loss(losses: list[float], lowest: str | None) -> None:
    trend = LossTrend()
    for epoch, loss in enumerate(losses, start=1):
        trend.add(f"epoch {epoch}", loss)
    warning = trend.warning()
    assert (warning is None) == (lowest is None)
    assert lowest is None or f"lowest at {lowest} and is {losses[-1]:.4f} now" in str(warning)


@pytest.mark.parametrize("best", [None, "min:loss"])
def test_a_fit_that_unlearns_says_so(capsys: pytest.CaptureFixture[str], best: str | None) -> None:
    """The rows move the weight by 1 per epoch, and the validation set wants it where it began."""
    rows = TensorDataset(torch.ones(4, 1))

    def loss(model: torch.nn.Linear, batch: list[torch.Tensor]) -> torch.Tensor:
        value = model(batch[0]).mean()
        return value if model.training else 1 + value.square()

    def net() -> torch.nn.Linear:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    trainer = quorate.Trainer(
        net,
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        batch_size=4,
        shards=1,
        devices="cpu",
        workers=1,
    )
    trainer.fit(rows, epochs=4, validation=quorate.Validation(rows, best=best))
    line = "the validation loss was lowest at epoch 1 (2.0000) and is 17.0000 now"
    assert (line in capsys.readouterr().out) == (best is None)
