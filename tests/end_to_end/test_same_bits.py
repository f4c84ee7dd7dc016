"""The promise: one digest on any number of devices, after a resume, and with slow workers."""

import random

import numpy as np
import pytest
import torch
from support.digests import digest_of
from support.everything import digest_on_one_tower, trained
from support.fits import fit, rows
from support.references import References
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import quorate

QUICK = {"ema_decay": 0.9, "epochs": 4}  # ``digest_of`` wants averaged weights


@pytest.mark.parametrize("shards", [1, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_one_digest_on_any_number_of_towers(shards: int, references: References) -> None:
    expected = digest_on_one_tower(references, shards)
    for workers in (2, 3, 9) if shards > 1 else (3,):
        assert digest_of(trained(workers, shards)) == expected, workers


def test_the_digest_depends_on_seed_and_shards_and_on_no_loader(references: References) -> None:
    digests = {digest_on_one_tower(references, shards) for shards in (4, 5)}
    digests |= {digest_of(trained(2, shards, seed=1)) for shards in (4, 5)}
    assert len(digests) == 4
    assert digest_of(trained(2, 4, loader_workers=2)) == digest_on_one_tower(references, 4)


class Careless(nn.Module):
    """Draws from the generators shared by all threads, and recomputes activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * random.uniform(0.5, 1.5) + np.random.normal()
        hidden = checkpoint(
            lambda y: self.dropout(torch.relu(self.first(y))), x, use_reentrant=False
        )
        return self.second(hidden)


class Draws(quorate.Callback):
    """The caller's own draws are neither disturbed nor disturbing."""

    def updated(self, report: quorate.Report) -> None:
        random.random()
        np.random.rand()


def test_models_that_draw_from_shared_generators_take_turns_and_leave_them_alone() -> None:
    def drawn() -> tuple[float, ...]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(3)  # as ``fit`` does

    found = {digest_of(fit(Careless, workers=n, callbacks=[Draws()], **QUICK)) for n in (1, 2, 4)}
    assert len(found) == 1
    seed()
    before = drawn()
    seed()
    fit(Careless, workers=2, **QUICK)
    assert drawn() == before


class ByIndex(Dataset[torch.Tensor]):
    """Augmented rows; `together` also offers several at once."""

    def __init__(self, together: bool) -> None:
        self.rows = torch.arange(48.0).reshape(48, 1)
        if together:
            self.__getitems__ = lambda rows: [self[row] for row in rows]

    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.rows[row] + torch.randn(1)


@pytest.mark.parametrize("together", [False, True])
def test_augmentation_belongs_to_the_sample_and_the_epoch(together: bool) -> None:
    """Draw one noise per row and epoch, whatever the shards, batches and workers."""

    def seen(batch_size: int, shards: int, workers: int, loader_workers: int) -> list[float]:
        values: set[float] = set()

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            values.update(round(float(v), 6) for v in batch.flatten())
            return model(batch).mean()

        settings = {"batch_size": batch_size, "shards": shards, "workers": workers, "epochs": 2}
        fit(nn.Linear(1, 1), loss, ByIndex(together), loader_workers=loader_workers, **settings)
        return sorted(values)

    expected = seen(8, 1, 1, 0)
    assert len(expected) == 2 * 48  # each row once per epoch, with another noise
    for other in [(8, 4, 2, 0), (48, 5, 2, 1)]:
        assert seen(*other) == expected, other


def test_one_loop_at_a_time() -> None:
    trainer = fit(steps=1)
    first = trainer.updates(rows(60))
    next(first)
    with pytest.raises(quorate.UserError, match="updates"):
        next(trainer.updates(rows(60)))
    first.close()
    assert [report.global_step for report in trainer.updates(rows(60))] == [3, 4, 5]
