"""What towers share: copies that are none, draws that come late, switches that a process has once.

Each case is a model and a loss function of ``tests/scripts/sharing.py``. On any engine and number
of workers it has one digest, and the values of a plain loop; or it is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.messages import expect_error
from support.runs import Ended, command, last_json, run_all
from torch import nn

import quorate
from quorate.errors import CopyError, SettingError
from quorate.replica.shared.copies import copy_of, deep_copy
from quorate.replica.shared.sharing import Sharing, rows_use
from quorate.replica.turns import Turns

# Copies that would hold on to the original: what is named where towers are asked for.
NO_COPY = {
    "l2_of_a_global": "'net.parameters' in the loss function (sharing.py:",
    "l1_by_a_function": "in penalty (sharing.py:",
    "loss_that_is_an_object": "the loss function.model is the model that is trained",
    "loss_that_is_a_partial": "argument 'other' of a partial is the model that is trained",
    "lambda_in_an_attribute": "'model.first' in the model.gate (sharing.py:",
    "patched_forward": "'model.last.bias' in the model.forward (sharing.py:",
    "hook_with_the_model": "a hook of the model.first",
    "weak_reference": "a weak reference, is the model that is trained",
    "hook_that_keeps_in_the_model": "is written to, of which a tower has a copy",
}
# What towers can do, at most with a line that says how.
SAME = {
    "method_bound_anew": "",
    "partial_of_a_method": "",
    "weight_norm": "",
    "pruned": "",
    "kept_from_before": "",
    "scripted": "",
    "traced": "",
    "hook_that_keeps_in_a_global": "'acts' in ",
    "counter_in_a_global": "'count' in loss",
    "object_that_keeps_its_output": "writes to the loss function",
    "method_that_keeps_its_output": "writes to the loss function",
    "module_that_keeps_its_input": "'criterion' in loss (sharing.py:",
    "default_dtype": "torch.set_default_dtype (sharing.py:",
    "default_dtype_that_stays": "the default dtype",
    "attention_kernel": "sdpa_kernel (sharing.py:",
    "onednn_off": "torch.backends.mkldnn.flags (sharing.py:",
}
DRAWS = ("late_python", "late_numpy", "default_generator", "thread_pool")

ENGINES = {
    "default": ("--workers", "1"),
    "2 processes": ("--workers", "2", "--engine", "processes"),
    "tower": ("--workers", "1", "--engine", "towers"),
    "2 towers": ("--workers", "2", "--engine", "towers"),
    "3 towers": ("--workers", "3", "--engine", "towers"),
}


def ended(case: str, *engines: str) -> dict[str, Ended]:
    words = {name: command("sharing.py", case, options=ENGINES[name]) for name in engines}
    return run_all(words)


def results(case: str, *engines: str) -> dict[str, Any]:
    found = ended(case, *engines)
    assert {e.code for e in found.values()} == {0}, [e.said for e in found.values()]
    return {name: last_json(e.out) for name, e in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", NO_COPY)
def test_a_copy_that_is_none_is_refused_by_name_or_not_needed(case: str) -> None:
    towers = ended(case, "tower", "2 towers")
    assert {e.code for e in towers.values()} == {2}
    for e in towers.values():
        assert NO_COPY[case] in e.said
        assert "use engine='processes'" in e.said
        assert len(e.said.splitlines()) == 1
    found = results(case, "default", "2 processes")
    assert len({r["digest"] for r in found.values()}) == 1
    assert all(r["off"] < 1e-6 for r in found.values())
    why = [line for line in found["default"]["said"] if "workers are processes" in line]
    assert len(why) == 1
    assert NO_COPY[case] in why[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", SAME)
def test_towers_are_right_where_a_copy_is(case: str) -> None:
    found = results(case, "2 processes", "tower", "3 towers")
    assert len({r["digest"] for r in found.values()}) == 1
    assert all(r["off"] < 1e-6 for r in found.values()), {n: r["off"] for n, r in found.items()}
    if SAME[case]:
        assert SAME[case] in " ".join(found["3 towers"]["said"])
        assert "workers compute one at a time" in " ".join(found["3 towers"]["said"])
    assert not any("workers are processes" in line for r in found.values() for line in r["said"])


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAWS)
def test_late_draws_are_keyed(case: str) -> None:
    found = results(case, "2 processes", "tower", "2 towers", "3 towers")
    assert len({r["digest"] for r in found.values()}) == 1
    assert all(r["off"] > 1e-6 for r in found.values())  # a plain loop draws other numbers


# --- no false alarm ------------------------------------------------------------------------------

rates = {"start": 0.1}
classes = 10


class Head(nn.Module):
    """Uses what scripts use: globals that are no models, its own class, a lambda, a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.act = lambda x: x * rates["start"]
        self.inner = nn.Linear(4, classes)
        self.inner.register_forward_hook(lambda _m, _i, out: out.clamp(-9, 9))
        self.forward = functools.partial(self.forward, scale=2.0)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        assert isinstance(self, Head)
        return self.act(self.inner(x)) * scale


USUAL: dict[str, Callable[[], nn.Module]] = {
    "a script's": Head,
    "convolutions": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2)),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 8),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, dropout=0.1),
    "gru": lambda: nn.GRU(3, 4, bidirectional=True),
    "embeddings": lambda: nn.EmbeddingBag(9, 4, max_norm=1.0),
    "lists": lambda: nn.ModuleList([nn.ModuleDict({"a": nn.Linear(1, 1)}), nn.ParameterList()]),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5]),
    "synchronised": lambda: nn.SyncBatchNorm(3),
    "checkpoints": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.RReLU()),
}


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.filterwarnings("ignore")
def test_no_alarm_of_usual_models(name: str) -> None:
    model = USUAL[name]()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        targets = torch.as_tensor(batch[1])
        return nn.functional.cross_entropy(model(batch[0]), targets) * rates["start"] / classes

    sharing, turns = Sharing(model, loss), Turns(side_by_side=True)
    sharing.tell(turns)
    assert sharing.obstacle is None
    assert (turns.draws, turns.reasons, turns.may_draw) == (False, [], None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parameters_of_copies_lie_where_they_are_told_to() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))  # type: ignore[no-untyped-call]
    dict(model.named_parameters())["0.bias"].requires_grad_(False)
    views = {n: p.detach() + 1 for n, p in model.named_parameters() if p.requires_grad}
    copied = copy_of(model, views, None, ())
    for name, parameter in copied.named_parameters():
        assert parameter.is_leaf
        assert parameter.requires_grad is (name in views)
        if name in views:
            assert parameter.data_ptr() == views[name].data_ptr()
    copied(torch.randn(4, 3)).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())
    means = [dict(m.named_buffers())["1.running_mean"] for m in (model, copied)]
    assert not torch.equal(*means)


def test_what_was_computed_before_and_is_used_is_no_copy() -> None:
    model: Any = nn.Linear(3, 2)
    model.doubled = model.weight * 2
    copied: Any = copy_of(model, {n: p.detach() for n, p in model.named_parameters()}, None, ())
    with expect_error(CopyError, name="engine", got="towers"):
        nn.functional.linear(torch.ones(1, 3), copied.doubled).sum().backward()


def test_an_average_of_a_model_with_computed_weights() -> None:
    with pytest.warns(FutureWarning):
        model = torch.nn.utils.weight_norm(nn.Linear(3, 2))
    copied = deep_copy(model)
    assert torch.equal(copied(torch.ones(1, 3)), model(torch.ones(1, 3)))
    assert copied.weight_v.data_ptr() != model.weight_v.data_ptr()


def test_rows_that_the_trained_model_makes_are_in_doubt() -> None:
    model = nn.Linear(3, 2)

    class Embedded:
        def __init__(self, encoder: nn.Module) -> None:
            self.encoder = encoder

    rows: list[Any] = [(torch.ones(3), 0)] * 10
    assert rows_use(model, {"the dataset": rows, "collate": torch.stack}) is None
    assert rows_use(model, {"the dataset": Embedded(nn.Linear(3, 2))}) is None
    said = rows_use(model, {"the dataset": Embedded(model)})
    assert said == "the dataset.encoder is the model that is trained"
    said = rows_use(model, {"collate": lambda items: model(torch.stack(items))})
    assert said is not None
    assert said.startswith("'model' in collate (test_sharing.py:")


def test_objects_that_raise_when_they_are_looked_at_are_passed_over() -> None:
    class Stands:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise RuntimeError("there is nobody")

    model: Any = nn.Linear(3, 2)
    stands = Stands()
    reg = [model]

    def loss(model: nn.Module, batch: Any) -> Any:
        return stands, reg

    assert "is the model that is trained" in str(Sharing(model, loss).obstacle)


def test_a_loss_function_that_is_an_object_may_write_to_itself_on_one_tower_at_a_time() -> None:
    class Keeps:
        def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.out = model(batch)
            return self.out.mean()

    class Criterion(nn.Module):
        def forward(self, out: torch.Tensor) -> torch.Tensor:
            self.kept = out
            return out.mean()

    model, criterion, x = nn.Linear(3, 2), Criterion(), torch.ones(4, 3)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "the loss function,": Keeps(),
        "the loss function, and": Keeps().__call__,
        "'criterion' in the loss function": lambda model, batch: criterion(model(batch)),
    }
    for way, loss in functions.items():
        turns = Turns(side_by_side=True)
        with Sharing(model, loss).watching(turns, towers=2, compiled=False):
            loss(model, x)
        (reason,) = turns.reasons
        assert reason.startswith(f"a shard writes to {way}"), reason
        assert reason.endswith("towers share it")


class Squared(nn.Linear):
    """A layer of an orthogonal weight, whose parametrization the loss caches."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        nn.utils.parametrizations.orthogonal(self)


def cached(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with nn.utils.parametrize.cached():
        return model(batch).square().mean()


def test_towers_take_turns_on_the_cache_of_parametrizations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = []
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    for workers in (1, 3):
        trainer = quorate.Trainer(
            Squared,
            cached,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=12,
            shards=6,
            workers=quorate.Workers(workers, engine="towers"),
        )
        trainer.fit(rows, epochs=2)
        found.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(map(torch.equal, *found))
    assert "raised RuntimeError" not in caplog.text


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(4).to_sparse(),
        torch.ones(1).expand(4),
    ],
)
def test_a_buffer_without_memory_of_its_own_is_refused(buffer: torch.Tensor) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("held", buffer)
    with expect_error(SettingError, name="model"):
        quorate.Trainer(model, cached, optimizer=torch.optim.SGD, batch_size=4)


@pytest.mark.filterwarnings("ignore")  # of torch.ao, which is deprecated
def test_towers_train_what_is_prepared_for_quantisation() -> None:
    """``module.qconfig`` leads back to the module, but only makes observers."""
    from torch.ao import quantization

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model, inplace=True)
    rows = torch.randn(16, 8)
    model(rows)  # scales get their shapes: buffers that grow are refused
    ranges = model[0].weight_fake_quant.scale.clone()
    run = quorate.Trainer(
        model,
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(2, engine="towers"),
    )
    run.fit(torch.utils.data.TensorDataset(rows), epochs=1)
    assert not torch.equal(model[0].weight_fake_quant.scale, ranges)
