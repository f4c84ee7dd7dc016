"""Mistakes without an error: the run ends with exit code 0, and the model has not learned.

Four mistakes are looked for before there are workers: a loss scaled by a GradScaler, a loss summed
over its rows, a tensor with a gradient outside of the model, and parameters of the model without an
optimizer. The first shard is computed a few times more, without a backward pass. Afterwards the
model, the generators and the state of the user's code are as before.

A trial computes values only, no gradients. torch's modules that draw, or normalise over a batch,
are in evaluation mode, so that a row's loss does not depend on the rows beside it. The user's
modules stay in training mode, because their forward may return something else in evaluation.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from quorate.coordination.keys import key
from quorate.data.source import Batch, Source
from quorate.errors import LossError
from quorate.machine.memory_fraction import free_cache
from quorate.machine.text import abridged_names
from quorate.replica.compiling import as_written
from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.loss_terms import LOSS
from quorate.replica.model import trainable, unchanged
from quorate.replica.nested import tensors
from quorate.replica.replica import Replica
from quorate.replica.shared.code import user_line
from quorate.replica.shared.references import found
from quorate.replica.witness.history import forget_cached
from quorate.replica.witness.scaled_loss import ScaledLoss, ScalerWatch
from quorate.training.probing.probe import on_shard
from quorate.training.probing.summed_loss import (
    LossValue,
    PartLosses,
    SummedLoss,
    compared_rows,
    is_right,
    measured,
    partitions,
)
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup

ROUNDING, ROUNDING_IN_16_BITS = 3e-4, 3e-2  # relative error of a loss
MOST_NODES = 200_000  # of a graph


def look_for_mistakes(workers: WorkerGroup, state: State, source: Source) -> None:
    """Look for mistakes that raise no error, and note them as questions about the values.

    Args:
        state: the state at the beginning of training.

    Raises:
        LossError: the loss is scaled by a ``GradScaler``.
    """
    notes = workers.replicas.notes
    if (line := _without_optimizer(state)) is not None:
        notes.question_values(line)
    if any(isinstance(module, torch.jit.ScriptModule) for module in state.model.modules()):
        return  # TorchScript specialises its kernels on the first shapes
    scaled: ScaledLoss | None = None
    contents = workers.replicas.contents()
    try:
        with unchanged(state.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # caused by few rows; training shows its own warnings
            trial = LossTrial(workers.probe_replica(state), state.parameters, source)
            scaled = trial.scaled()
            if scaled is None:
                outside = trial.outside_leaves(state.model)
                if outside:
                    notes.question_values(_outside_text(workers, state, outside))
                summed = trial.summed() if _depends_on_shards(workers) else None
                if summed is not None:
                    notes.question_values(_sum_text(summed))
    except Exception:  # user code that fails with other rows: training goes on
        pass
    finally:
        forget_cached(state.model)
        contents.restore()
        if workers.has_processes:
            free_cache(workers.devices)
    if scaled is not None:
        raise LossError(
            f"the loss is multiplied by {scaled.scale:,g}, as a GradScaler scales it "
            f"({scaled.line})",
            fix="return the loss as it is, and pass precision='fp16' (or 'bf16'), which scales "
            "the loss and unscales its gradients",
        )


def _depends_on_shards(workers: WorkerGroup) -> bool:
    """Return whether a loss that is a sum would change with the number of shards.

    ``Gather`` computes the loss of the whole batch, and ``shards=1`` is a choice.
    """
    return workers.config.gather is None and workers.config.shards != 1


# --- parameters that no optimizer has -------------------------------------------------------------


def _without_optimizer(state: State) -> str | None:
    optimizers = state.phases.optimizers
    trained = {name for each in optimizers for group in each.groups for name in group}
    # An optimizer made of others may list the parameters of some of them only.
    others = {
        id(parameter)
        for each in optimizers
        for inner in _optimizers_within(each.user_optimizer)
        for group in inner.param_groups
        for parameter in group["params"]
    }
    parameters = trainable(state.model)
    left = [n for n, p in parameters.items() if n not in trained and id(p) not in others]
    if not left:
        return None
    elements = sum(parameters[name].numel() for name in left)
    return (
        f"no optimizer has {len(left)} of the model's {len(parameters)} trainable parameters "
        f"({elements:,} elements), so training never changes {abridged_names([*map(repr, left)])}; "
        "give the optimizer all parameters that its function receives, or call "
        "requires_grad_(False) on the others"
    )


def _optimizers_within(optimizer: Optimizer) -> Iterator[Optimizer]:
    for value in vars(optimizer).values():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Optimizer) and each is not optimizer:
                yield each


# --- tensors outside of the model -----------------------------------------------------------------


def _outside_text(workers: WorkerGroup, state: State, outside: Sequence[torch.Tensor]) -> str:
    names = {id(t): f"tensor {number}" for number, t in enumerate(outside)}
    roots = {"the loss function": workers.config.loss}
    ways: dict[int, str] = {}
    for line in found({"the model": state.model}, roots, names).originals:
        way, _, number = line.rpartition(" is tensor ")
        ways.setdefault(int(number), way)
    texts = [
        f"{ways.get(number, 'a tensor')} of shape {tuple(tensor.shape)}"
        for number, tensor in enumerate(outside)
    ]
    are, them = ("a tensor", "it") if len(texts) == 1 else (f"{len(texts)} tensors", "them")
    return (
        f"the loss depends on {are} outside the model with requires_grad=True, and no optimizer "
        f"trains {them}: {abridged_names(texts)}; make {them} part of the model (a "
        "torch.nn.Parameter or a module), or call requires_grad_(False)"
    )


# --- a loss that is a sum -------------------------------------------------------------------------


def _sum_text(summed: SummedLoss) -> str:
    whole, share = summed.whole, summed.share
    of = f"{summed.of} is" if share > 0.95 else f"{share:.0%} of {summed.of} is"
    calls = f" ({summed.calls})" if summed.calls else ""
    return (
        f"{of} a sum over the rows of a shard{calls}: {whole:.6g} for {summed.rows} rows, "
        f"{summed.halves[0]:.6g} and {summed.halves[1]:.6g} for the two halves; the gradient of a "
        "step is the mean over shards, so it depends on shards=; return the mean over the rows, or "
        '{"loss": sum / n, "weight": n} with n rows, tokens or pixels'
    )


# --- the trial of the loss ------------------------------------------------------------------------


class LossTrial:
    """The computation of losses of the first step's rows.

    Args:
        replica: a replica for this use alone.
        parameters: the parameters to compute with.
        source: the source of the rows.
    """

    def __init__(self, replica: Replica, parameters: Flat, source: Source) -> None:
        replica.witness.is_silent = True
        replica.pull(parameters, version=object())
        self._replica = replica
        self._source = source
        plan = source.plan
        self._rows = compared_rows(len(plan.shard(0, 0)), plan.batch_rows(0))
        self._whole = self._loaded(slice(0, self._rows))
        self._watch, self._leaves = ScalerWatch(), list[torch.Tensor]()
        self._compared = LOSS  # the loss, or the term of the loss, that is compared
        self._terms: list[str] = []
        with self._watch.watching():
            self._value_of_whole = self._value(self._whole, note=self._note_leaves)

    def scaled(self) -> ScaledLoss | None:
        """Return how a ``GradScaler`` multiplies the loss; None if no scaler does."""
        if not self._watch.scalers:
            return None
        value = self._value_of_whole.loss
        with self._watch.without_scaling():
            unscaled = self._value(self._whole).loss
        if unscaled == 0 or abs(value - unscaled) <= 1e-3 * abs(unscaled):
            return None  # the loss is unscaled again, or the scaler serves another purpose
        return ScaledLoss(value / unscaled, self._watch.scalers[0][1])

    def outside_leaves(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Return leaves outside of the model that require a gradient and persist between calls.

        A tensor made by the loss function in each call does not count, such as the point of a
        gradient penalty. Nor does a parameter of a module in evaluation mode, frozen on purpose,
        such as a pre-trained network to compare images.

        Args:
            model: the user's model.
        """
        ours = {id(p) for each in (model, self._replica.model) for p in each.parameters()}
        found = [leaf for leaf in self._leaves if id(leaf) not in ours]
        if not found:
            return []
        self._value(self._whole, note=self._note_leaves)
        kept = {id(leaf) for leaf in self._leaves} - _parameters_in_evaluation()
        return [leaf for leaf in found if id(leaf) in kept]

    def summed(self) -> SummedLoss | None:
        """Return how a loss, or a term of it, is a sum over its rows; None if none is known."""
        if self._rows < 2:
            return None
        try:
            for name in self._terms or [LOSS]:
                self._compared = name
                if (found := self._summed()) is not None:
                    return found
            return None
        finally:
            self._compared = LOSS

    def _summed(self) -> SummedLoss | None:
        halves, interleaved, parts = partitions(self._rows)
        tolerance = ROUNDING if self._replica.is_in_fp32 else ROUNDING_IN_16_BITS
        loaded = [self._loaded(part) for part in halves]
        whole = self._value(self._whole) if self._terms else self._value_of_whole
        in_halves = [self._value(batch) for batch in loaded]
        if is_right(whole, in_halves, tolerance):
            return None
        more = [self._loaded(part) for part in interleaved], [self._loaded(part) for part in parts]

        def compute(number: int) -> PartLosses:
            values = partial(self._values, number)
            return PartLosses(self._value(self._whole, number), *map(values, (loaded, *more)))

        draws = self._value(self._whole, 1) != whole
        found = measured(compute, draws=draws, tolerance=tolerance)
        if found is None:
            return None
        share, totals = found
        first, second = (value.loss for value in totals.halves)
        of = f"term {self._compared!r} of the loss" if self._terms else "the loss"
        return SummedLoss(share, totals.whole.loss, (first, second), self._rows, self._sums(), of)

    def _sums(self) -> str:
        """Return the calls that make sums of the loss, in words; empty if no call is found."""
        watch = _SumWatch()
        self._value(self._whole, watch=lambda: watch)
        return ", ".join(dict.fromkeys(watch.calls))

    def _note_leaves(self, loss: torch.Tensor, batch: Any) -> None:
        """Note the leaves of the loss's graph, except for tensors of the batch."""
        given = {id(tensor) for tensor in tensors(batch)}
        self._leaves = [leaf for leaf in _leaves_of(loss) if id(leaf) not in given]

    def _loaded(self, part: slice) -> Batch:
        return self._source.load_part((0, 0), part)

    def _values(self, number: int, batches: Iterable[Batch]) -> list[LossValue]:
        return [self._value(batch, number) for batch in batches]

    def _value(
        self,
        batch: Batch,
        number: int = 0,
        *,
        note: Callable[[torch.Tensor, Any], None] | None = None,
        watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> LossValue:
        """Compute the loss of some rows.

        Args:
            number: selects the random numbers that the loss draws.
            note: receives the loss, with its graph, and the batch.
            watch: makes a context around the call of the loss function.
        """
        replica, plan = self._replica, self._source.plan

        def calm(loss: Loss) -> Loss:
            def called(model: torch.nn.Module, rows: Any, *at: Any) -> Any:
                _calm(model)
                with watch():
                    returned = loss(model, rows, *at)
                if note is not None:
                    value = returned[LOSS] if isinstance(returned, Mapping) else returned
                    if isinstance(value, Mapping):
                        values = (t[LOSS] if isinstance(t, Mapping) else t for t in value.values())
                        value = sum(values, torch.zeros(()))
                    note(value, rows)
                return returned

            return called

        with on_shard(replica, batch, plan) as shard, replica.watched(calm), as_written():
            seed = key("mistakes", plan.seed, number)
            total = replica.evaluation(shard.data, shard.rows, shard.stream, seed, training=True)
        weight = total.weight
        if (found := total.denominators) is not None:
            weight = found.weights.get(self._compared, weight)
            losses = [name for name in total.metrics if name.endswith(f"/{LOSS}")]  # of phases
            self._terms = [*found.names, *(name for name in losses if name not in found.terms)]
        loss = total.metrics.get(self._compared, 0.0)
        return LossValue(loss / weight if weight else float("nan"), weight)


def _calm(model: torch.nn.Module) -> None:
    """Put torch's own modules in evaluation mode: some of them draw, or normalise over rows."""
    for module in model.modules():
        if type(module).__module__.partition(".")[0] == "torch":
            module.training = False


def _leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors at the leaves of a loss's graph."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        left += [inner for inner, _ in node.next_functions]
    return [*found.values()]


def _parameters_in_evaluation() -> set[int]:
    """Return the ``id`` of each parameter of any module in evaluation mode."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    return {
        id(parameter)
        for module in modules
        if not module.training
        for parameter in module.parameters(recurse=False)
    }


class _SumWatch(TorchFunctionMode):
    """A mode that notes calls which reduce many numbers to a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_sum = name == "sum" or kwargs.get("reduction") == "sum"
        if is_sum and isinstance(returned, torch.Tensor) and returned.dim() == 0:
            line = user_line(sys._getframe(1))
            call = f"{name}()" if name == "sum" else f"{name}(reduction='sum')"
            self.calls.append(f"{call} at {line}" if line else call)
        return returned
