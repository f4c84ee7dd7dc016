"""Gradients by rows: what torch's optimizers make of them, who takes them, sums by row."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import NotFiniteError, SettingError
from quorate.replica.digest import digest
from quorate.replica.flat import Layout
from quorate.replica.sparse.rows import Rows, rows_of

# torch's own optimizers make sparse tensors without a word on checks, which torch then speaks of.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

SCRIPT = Path(__file__).parents[2] / "scripts" / "sparse_tables.py"
_spec = importlib.util.spec_from_file_location("sparse_tables", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)
script.FOLDER = None

BATCH, CPU = 16, torch.device("cpu")
Factory = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.01),
    "sparse_adam": lambda params: torch.optim.SparseAdam(params, lr=0.05),
}


class Table(nn.Module):
    """A table, and if asked for a dense layer on it."""

    def __init__(self, *, has_head: bool = True, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 4, sparse=True, padding_idx=0, **options)
        self.head = nn.Linear(4, 4) if has_head else nn.Identity()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words).mean(1))


def data(*, each_once: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(60, (48, 3), generator=generator)
    if each_once:  # no batch reads a row twice
        words = torch.cat([torch.randperm(60, generator=generator)[:48] for _ in range(3)])
        words = words.reshape(9, BATCH, 1).flatten(0, 1)
    return TensorDataset(words, torch.randint(4, (len(words),), generator=generator))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(
    model: nn.Module,
    optimizer: Factory,
    dataset: TensorDataset,
    *,
    workers: int = 1,
    shards: int = 4,
    loss: Any = loss,
    **options: Any,
) -> quorate.Trainer:
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=quorate.Optimize(optimizer, **options),
        batch_size=BATCH,
        shards=shards,
        seed=0,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
    )
    trainer.fit(dataset, epochs=2, shuffle=False)
    return trainer


def plain(
    model: nn.Module, optimizer: Factory, dataset: TensorDataset, clip_norm: float | None = None
) -> nn.Module:
    inner = optimizer(model.parameters())
    words, labels = dataset.tensors
    for _ in range(2):
        for start in range(0, len(words), BATCH):
            inner.zero_grad()
            loss(model, [words[start : start + BATCH], labels[start : start + BATCH]]).backward()
            grads = [p.grad.coalesce() if p.grad.is_sparse else p.grad for p in model.parameters()]
            if clip_norm is not None:
                norm = sum(float((g.values() if g.is_sparse else g).square().sum()) for g in grads)
                scale = min(1.0, clip_norm / (norm**0.5 + 1e-6))
                grads = [grad * scale for grad in grads]
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad.coalesce() if grad.is_sparse else grad
            inner.step()
    return model


def seeded(**options: Any) -> Table:
    torch.manual_seed(0)
    return Table(**options)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_plain_torch(name: str, clip_norm: float | None) -> None:
    has_head = name != "sparse_adam"
    expected = plain(seeded(has_head=has_head), OPTIMIZERS[name], data(), clip_norm).state_dict()
    model = seeded(has_head=has_head)
    trained(model, OPTIMIZERS[name], data(), workers=2, clip_norm=clip_norm)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_shard_is_plain_torch_to_the_bit(name: str) -> None:
    has_head = name != "sparse_adam"
    dataset = data(each_once=name == "sgd")
    expected = plain(seeded(has_head=has_head), OPTIMIZERS[name], dataset).state_dict()
    model = seeded(has_head=has_head)
    trained(model, OPTIMIZERS[name], dataset, shards=1)
    assert digest([*model.state_dict().items()]) == digest([*expected.items()])


def test_optimizers_see_rows_and_others_vectors() -> None:
    seen: dict[str, Any] = {}

    class Sees(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        seen[str(tuple(parameter.shape))] = parameter.grad
            return super().step(closure)

    trained(seeded(), lambda params: Sees(params, lr=0.1), data())
    table = seen["(60, 4)"]
    assert table.layout == torch.sparse_coo
    assert table.is_coalesced()
    assert table.indices().shape[1] < 48
    assert seen["(4, 4)"].layout == torch.strided


@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparse_adam"])
def test_one_digest_on_any_number_of_towers(name: str) -> None:
    """Padded, tied, in a bag, frozen, and one that most shards do not read."""

    def on(workers: int) -> str:
        torch.manual_seed(0)
        model = script.Tables(is_deep=name != "sparse_adam")
        trained(model, script.OPTIMIZERS[name], script.data(), workers=workers, clip_norm=1.0,
                loss=script.loss)  # fmt: skip
        return digest([*model.state_dict().items()])

    assert on(3) == on(1)


def test_a_norm_that_forward_bounds_is_kept_on_any_number_of_towers() -> None:
    def on(workers: int) -> str:
        model = seeded(max_norm=0.5)
        trained(model, OPTIMIZERS["sgd"], data(), workers=workers)
        return digest([*model.state_dict().items()])

    assert on(2) == on(1)


def test_a_loss_over_the_whole_batch_and_tables_alone() -> None:
    def contrast(model: nn.Module, rows: Any) -> torch.Tensor:
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    def on(workers: int) -> dict[str, torch.Tensor]:
        model = seeded(has_head=False)
        gather = quorate.Gather(lambda model, batch: model(batch[0]), contrast)
        trained(model, OPTIMIZERS["sparse_adam"], data(), loss=gather, workers=workers)
        return model.state_dict()

    expected = seeded(has_head=False)
    inner = OPTIMIZERS["sparse_adam"](expected.parameters())
    for _ in range(2):
        for words in data().tensors[0].split(BATCH):
            inner.zero_grad()
            contrast(expected, expected(words)).backward()
            inner.step()
    found = on(2)
    assert digest([*found.items()]) == digest([*on(1).items()])
    torch.testing.assert_close(found, expected.state_dict(), rtol=1e-5, atol=1e-6)


def test_phases_have_tables_and_dense_layers_of_their_own() -> None:
    def both(models: Any, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(models["head"](models["table"](batch[0])), batch[1])

    def on(workers: int) -> str:
        models = {"table": seeded(has_head=False), "head": nn.Linear(4, 4)}
        trainer = quorate.Trainer(
            models,
            {"table": both, "head": both},
            optimizer={
                "table": OPTIMIZERS["sparse_adam"],
                "head": lambda params: torch.optim.Adam(params, lr=0.1),
            },
            batch_size=BATCH,
            shards=4,
            seed=0,
            devices="cpu",
            workers=quorate.Workers(workers, engine="towers"),
        )
        before = digest([*models["table"].state_dict().items()])
        trainer.fit(data(), epochs=1)
        state = models["table"].state_dict()
        assert digest([*state.items()]) != before
        return digest([*state.items(), *models["head"].state_dict().items()])

    assert on(2) == on(1)


@pytest.mark.parametrize(
    ("got", "optimizer"),
    [
        ("Adam", torch.optim.Adam),
        ("SGD", lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
        ("Adagrad", lambda p: torch.optim.Adagrad(p, weight_decay=0.1)),
        ("SGD", lambda p: torch.optim.SGD(p, lr=0.1, fused=True)),
        ("LBFGS", torch.optim.LBFGS),
        ("SparseAdam", lambda p: torch.optim.SparseAdam(p)),
    ],
    ids=["adam", "weight decay", "adagrad", "fused", "lbfgs", "sparse adam"],
)
def test_who_takes_no_rows_says_so_before_the_first_update(got: str, optimizer: Factory) -> None:
    model = seeded()
    before = digest([*model.state_dict().items()])
    of_torch = r"(?<=\(sparse=True\): )[^;]*"
    with expect_error(SettingError, name="optimizer", got=got, hide=of_torch):
        trained(model, optimizer, data())
    assert digest([*model.state_dict().items()]) == before


def test_ray_refuses_it_in_a_line() -> None:
    pytest.importorskip("ray")
    from quorate.replica.flat import Flat
    from quorate.transports.ray.site import RaySite

    class HasTables:
        parameters: Flat = Layout([("table", torch.ones(4, 2))], {"table"}).new(CPU)

    with expect_error(SettingError, name="engine", got="ray"):
        RaySite(Any, HasTables(), Any, None, None, 1)  # type: ignore[arg-type]


def test_with_momentum_it_is_dense_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trained(seeded(), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), data())
    assert "'words.weight' comes by rows (sparse=True) and is made dense" in capsys.readouterr().out


def test_what_is_not_finite_is_named() -> None:
    def broken(model: Any, batch: list[torch.Tensor]) -> torch.Tensor:
        rows = model.words(batch[0])
        rows.register_hook(lambda grad: grad * float("inf"))
        return F.cross_entropy(model.head(rows.mean(1)), batch[1])

    with expect_error(NotFiniteError):
        trained(seeded(), OPTIMIZERS["sgd"], data(), loss=broken)


def test_sums_are_those_of_dense_gradients() -> None:
    generator = torch.Generator().manual_seed(1)

    def some(count: int) -> torch.Tensor:
        which = torch.randint(20, (1, count), generator=generator)
        values = torch.randn(count, 3, generator=generator)
        return torch.sparse_coo_tensor(which, values, (20, 3), check_invariants=False)

    for counts in ((7, 9), (0, 4), (4, 0), (0, 0)):
        left, right = map(some, counts)
        found = rows_of(left, torch.float32, CPU, 2.0).add(rows_of(right, torch.float32, CPU, 4.0))
        parameter = torch.zeros(20, 3)
        assert found.fault(parameter) is None
        expected = left.to_dense() * 2.0 + right.to_dense() * 4.0
        torch.testing.assert_close(found.like(parameter).to_dense(), expected)
        again = rows_of(right, torch.float32, CPU, 4.0).add(rows_of(left, torch.float32, CPU, 2.0))
        assert torch.equal(again.values, found.values)


def test_a_dense_gradient_of_a_table_is_all_of_its_rows() -> None:
    found = rows_of(torch.ones(3, 2), torch.float32, CPU, 0.5)
    assert found.which.tolist() == [0, 1, 2]
    assert torch.equal(found.values, torch.full((3, 2), 0.5))


@pytest.mark.parametrize(
    ("which", "values", "fault"),
    [
        ([1, 1], torch.zeros(2, 3), "no order"),
        ([2, 1], torch.zeros(2, 3), "no order"),
        ([1, 20], torch.zeros(2, 3), "rows are 1 to 20"),
        ([-1, 2], torch.zeros(2, 3), "rows are -1 to 2"),
        ([1, 2], torch.zeros(1, 3), "values are"),
        ([1, 2], torch.zeros(2, 3, dtype=torch.float64), "values are torch.float64"),
    ],
)
def test_what_cannot_be_rows_of_a_parameter(
    which: list[int], values: torch.Tensor, fault: str
) -> None:
    found = Rows(torch.tensor(which), values).fault(torch.zeros(20, 3))
    assert found is not None
    assert fault in found


def test_tables_lie_behind_what_has_a_place_in_gradients() -> None:
    tensors = {"a": torch.ones(5), "table": torch.ones(40, 3), "b": torch.ones(7)}
    layout = Layout(tensors.items(), {"table"})
    assert [*layout.sections] == [*tensors]
    assert [*layout.gradients.sections] == ["a", "b"]
    for name, section in layout.gradients.sections.items():
        assert section == layout.sections[name]
    assert layout.gradients.sizes == [layout.sections["table"].start]
    assert Layout(tensors.items()).gradients.sizes == [layout.sizes[0]]
