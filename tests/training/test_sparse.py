"""Gradients by rows: the effect of torch's optimizers, accepting optimizers, sums by row."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest
from support.fits import fit
from support.messages import expect_error
from support.plain_loop import Make, plain_loop
from support.runs import command, run
from torch import nn
from torch.utils.data import TensorDataset

from quorate.errors import SettingError

# torch's own optimizers make sparse tensors without a word on checks, and torch warns of the lack.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

BATCH = 16
OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01),
    "sparse_adam": partial(torch.optim.SparseAdam, lr=0.05),  # takes tables alone
}


class Table(nn.Module):
    """Has a table, one rarely read, a frozen one; and on request a dense layer on top."""

    def __init__(self, *, has_head: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 4, sparse=True, padding_idx=0)
        self.rare = nn.Embedding(60, 4, sparse=True)
        self.frozen = nn.Embedding(60, 4, sparse=True).requires_grad_(False)
        self.head = nn.Linear(4, 4) if has_head else nn.Identity()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.head((self.words(words) + self.frozen(words)).mean(1))
        if (few := words[:, 0] < 5).any():
            found = found + few[:, None] * self.rare(words[:, 0])
        return found


def seeded(*, has_head: bool = True) -> Table:
    torch.manual_seed(0)
    return Table(has_head=has_head)


def data(*, each_once: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(60, (48, 3), generator=generator)
    if each_once:  # no batch reads a row twice
        words = torch.cat([torch.randperm(60, generator=generator)[:48] for _ in range(3)])
        words = words.reshape(9, BATCH, 1).flatten(0, 1)
    return TensorDataset(words, torch.randint(4, (len(words),), generator=generator))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(model: nn.Module, optimizer: Any, dataset: Any = None, **options: Any) -> str:
    """Train the model; return the digest."""
    defaults = {"loss": loss, "batch_size": BATCH, "shards": 4, "workers": 1, "epochs": 2}
    dataset = data() if dataset is None else dataset
    fit(model, data=dataset, optimizer=optimizer, shuffle=False, **defaults | options)
    return digest(model.state_dict().items())


def plain(
    model: nn.Module, make: Make, dataset: TensorDataset, clip_norm: float | None = None
) -> nn.Module:
    def adapt() -> None:
        held = [p for p in model.parameters() if p.grad is not None]
        grads = [p.grad.coalesce() if p.grad.is_sparse else p.grad for p in held]  # type: ignore[union-attr]
        if clip_norm is not None:
            norm = sum(float((g.values() if g.is_sparse else g).square().sum()) for g in grads)
            grads = [grad * min(1.0, clip_norm / (norm**0.5 + 1e-6)) for grad in grads]
        for parameter, grad in zip(held, grads, strict=True):
            parameter.grad = grad.coalesce() if grad.is_sparse else grad

    steps = 2 * len(dataset) // BATCH
    plain_loop(model, make, loss, dataset, steps=steps, batch_size=BATCH, adapt=adapt)
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_plain_torch_and_with_one_shard_to_the_bit(name: str) -> None:
    make, has_head = OPTIMIZERS[name], name != "sparse_adam"
    words, labels = data().tensors
    few = TensorDataset(words % 3, labels)  # rows read by all shards
    for dataset, clip_norm in ((data(), None), (data(), 0.05), (few, None)):
        expected = plain(seeded(has_head=has_head), make, dataset, clip_norm).state_dict()
        model = seeded(has_head=has_head)
        trained(model, make, dataset, workers=2, clip_norm=clip_norm)
        torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=1e-5, atol=1e-6)
    dataset = data(each_once=name == "sgd")
    expected = plain(seeded(has_head=has_head), make, dataset).state_dict()
    found = trained(seeded(has_head=has_head), make, dataset, shards=1)
    assert found == digest(expected.items())


def test_optimizers_see_rows_and_others_vectors() -> None:
    seen: dict[str, Any] = {}

    class Sees(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        seen[str(tuple(parameter.shape))] = parameter.grad
            return super().step(closure)

    trained(seeded(), partial(Sees, lr=0.1))
    table = seen["(60, 4)"]
    assert table.layout == torch.sparse_coo
    assert table.is_coalesced()
    assert table.indices().shape[1] < 48
    assert seen["(4, 4)"].layout == torch.strided


@pytest.mark.parametrize(
    ("got", "optimizer"),
    [
        ("Adam", torch.optim.Adam),
        ("SGD", partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)),
        ("SGD", partial(torch.optim.SGD, lr=0.1, fused=True)),
        ("LBFGS", torch.optim.LBFGS),
        ("SparseAdam", torch.optim.SparseAdam),
    ],
    ids=["adam", "weight decay", "fused", "lbfgs", "sparse adam"],
)
def test_who_takes_no_rows_says_so_before_the_first_update(got: str, optimizer: Any) -> None:
    model = seeded()
    before = digest(model.state_dict().items())
    of_torch = r"(?<=\(sparse=True\): )[^;]*"
    with expect_error(SettingError, name="optimizer", got=got, hide=of_torch):
        trained(model, optimizer)
    assert digest(model.state_dict().items()) == before


def test_with_momentum_it_is_dense_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trained(seeded(), partial(torch.optim.SGD, lr=0.1, momentum=0.9), steps=1)
    assert "'words.weight' comes by rows (sparse=True) and is made dense" in capsys.readouterr().out


# --- on Ray ---------------------------------------------------------------------------------------

ON_RAY = """
import sys, torch, quorate
from torch import nn
makes = {"Adafactor": torch.optim.Adafactor, "sparse": torch.optim.SGD}
trainer = quorate.Trainer(
    lambda: nn.Embedding(9, 4, sparse=sys.argv[1] == "sparse"),
    lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda params: makes[sys.argv[1]](params, lr=0.1), batch_size=4, shards=2,
)
trainer.fit(torch.utils.data.TensorDataset(torch.arange(8)), steps=2)
"""


@pytest.mark.parametrize(
    ("name", "servers", "said"),
    [
        ("sparse", (), "engine: got 'ray', expected one that hands over the gradient of"),
        ("Adafactor", ("--servers", "1"), "servers: got 'Adafactor', expected"),
    ],
)
def test_ray_refuses_gradients_by_rows_and_its_servers_optimizers_of_whole_tensors(
    name: str, servers: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="quorate's extra ray is not installed")
    script = tmp_path / "script.py"
    script.write_text(ON_RAY)
    options = ("--engine", "ray", "--workers", "1", *servers)
    ended = run(command(script, name, options=options))
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.said
    assert said in ended.err
