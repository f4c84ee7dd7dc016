"""The contract of a loss function: ``loss(model, batch)`` and its result.

A third parameter receives the position in the run: ``replica/beside``.

The result is a scalar tensor, the mean over the shard's rows; or a dict with this tensor under
"loss", further scalars under names of the user's choice (metrics, also means over rows), and, where
the means are over n tokens or pixels and not over rows, "weight": n. Names listed as totals may
hold counts: integers of any shape, summed and not averaged. Or the result is the output of a model
with a loss of its own (a special mapping, as Hugging Face's): then only the scalars count.

The value under "loss" may be a dict of terms by name, see ``loss_terms``. A term, and a metric too,
is a scalar or {"loss": mean, "weight": n} with a denominator n of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import msgspec
import torch

from quorate.coordination.plan import Plan, Rows
from quorate.errors import LossError
from quorate.replica.beside.asks import asks_for_at
from quorate.replica.beside.at import NOWHERE, at_of
from quorate.replica.beside.shared import are_any
from quorate.replica.beside.view import ValuesView
from quorate.replica.loss_terms import LOSS, Denominators, Scales, combined
from quorate.replica.outputs.rows import Piece
from quorate.replica.totals import NONE, Counts, Wanted, counts

__all__ = ["NONE", "Loss", "LossCall", "LossResult", "Wanted", "read"]

Loss = Callable[..., Any]  # (model, batch), or (model, batch, at)


class LossCall:
    """The call of a loss function, with the values readable beside model and batch.

    Made once for all shards of a replica. All calls of a loss function are made here.

    Args:
        loss: the user's loss function, as given.
        totals: names of counts and outputs in the result.
        device: the device of the replica.
        begin_phase: receives the phase of each shard; None: all phases.
    """

    def __init__(
        self,
        loss: Loss,
        totals: Wanted,
        device: torch.device,
        begin_phase: Callable[[str | None], None],
    ) -> None:
        self.loss, self.totals = loss, totals
        self._begin_phase = begin_phase
        self.shared = ValuesView(device)  # the shard's view of ``Shared`` values
        self.at = NOWHERE  # the position of the next shard
        self.asks_for_at = asks_for_at(loss)
        self.reads_numbers = self.asks_for_at or are_any()  # numbers that may differ between shards

    def place(self, plan: Plan, step: int, rows: Rows, *, of_phase: bool = True) -> None:
        """Set the position of the next shard: its rows, (b,) int64, of a step of the plan.

        Args:
            of_phase: whether the shard is computed for the phase of the step, and not for all
                phases.
        """
        if self.asks_for_at:
            self.at = at_of(plan, step, rows)
        self._begin_phase(plan.phase(step) if of_phase else None)

    def __call__(
        self, function: Loss, model: torch.nn.Module, batch: Any, *, training: bool
    ) -> Any:
        """Return the result of the loss function, unchecked.

        Args:
            function: the loss function, or a wrapper: compiled, or watched.
            training: whether a gradient is wanted.
        """
        if not self.asks_for_at:
            return function(model, batch)
        at = self.at
        return function(
            model, batch, at if at.training is training else replace(at, training=training)
        )


class LossResult(msgspec.Struct, eq=False):
    """A loss function's result, checked."""

    loss: torch.Tensor  # ()
    metrics: dict[str, float]  # means; "loss" first
    weight: float
    multiplier: float  # of the gradient; 0: there is no gradient
    totals: Counts = {}
    outputs: dict[str, Any] = {}  # collected outputs by name, on the host
    denominators: Denominators | None = None  # None: ``weight`` is the denominator of all means

    @property
    def awaits_totals(self) -> bool:
        """True if the gradient of the shard follows from the weights of all shards."""
        return self.denominators is not None and self.denominators.awaits_totals

    def weighted(self) -> dict[str, float]:
        """Return weight * metrics; zero for a zero weight, even if a mean over nothing is NaN."""
        weight, found = self.weight, self.denominators
        weights = {} if found is None else found.weights
        if not weights:
            if weight == 0:
                return dict.fromkeys(self.metrics, 0.0)
            return {name: weight * value for name, value in self.metrics.items()}
        each = {name: weights.get(name, weight) for name in self.metrics}
        return {n: each[n] * value if each[n] else 0.0 for n, value in self.metrics.items()}

    def pieces(self) -> list[Piece]:
        """Return the collected outputs, if any; the caller knows the step and shard."""
        return [Piece(0, 0, self.outputs)] if self.outputs else []


def read(
    returned: object,
    *,
    rows: int,
    training: bool,
    totals: Wanted = NONE,
    scales: Scales | None = None,
) -> LossResult:
    """Check the result of a loss function for a shard of ``rows`` rows.

    Args:
        totals: names of counts and of collected outputs. In training, no outputs are collected.
        scales: of terms with denominators of their own; None: the shard is a whole batch.

    Raises:
        LossError: the loss is no scalar or has no gradient, a metric is no scalar, counts are no
            integers, or the weight is negative or not finite.
        OutputError: a collected output is not by row.
    """
    if type(returned) is torch.Tensor and not totals:
        loss = _loss(returned, training=training)
        scalar = loss if loss.dim() == 0 else loss.reshape(())
        weight = float(rows)
        return LossResult(scalar, {"loss": loss.item()}, weight, weight)
    values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    if "loss" not in values:
        raise LossError(
            "loss",
            got=f"a dict with {_names(values)}",
            expected='a dict with the key "loss"',
            fix='put the scalar to be minimised under "loss"',
        )
    given = values.pop("loss")
    weight = _weight(values.pop("weight", rows))
    reader = _DenominatorReader(weight)
    is_output = isinstance(returned, Mapping) and type(returned) is not dict
    terms_multiplier: float | None = None
    terms = dict[str, Any]()
    if isinstance(given, Mapping):
        terms = reader.terms_of(LOSS, given)
        scalars = {
            name: _loss(term, f"term {name!r}", training=False).reshape(())
            for name, term in terms.items()
        }
        given, terms_multiplier = combined(scalars, reader.denominators, scales)
    loss = _loss(given, training=training and terms_multiplier != 0)
    summed, outputs = Counts(), dict[str, Any]()
    for name, kept in totals.items():
        if name not in values:
            continue
        value = values.pop(name)
        if kept is None:
            summed[name] = counts(name, value)
        elif not training:
            outputs[name] = kept.of(name, value, rows)
    numbers: dict[str, torch.Tensor] = {"loss": loss.detach()}
    numbers |= {name: term.detach() for name, term in terms.items()}
    for name, value in reader.scalars_of(values) if not is_output else values.items():
        tensor = value if isinstance(value, torch.Tensor) else _tensor(value)
        if is_output and (tensor is None or tensor.numel() != 1):
            continue  # logits, hidden states
        if tensor is None or tensor.numel() != 1 or tensor.is_complex():
            raise LossError(
                f"metric {name!r}",
                got=_describe(value),
                expected="a scalar",
                fix="reduce the value, or list counts that are to be summed in Trainer(totals=...)",
            )
        if str(name) in numbers:
            raise LossError(
                f"metric {name!r}",
                got="a term of the loss with the same name",
                expected="a name of its own",
                fix="rename one of the two",
            )
        tensor = tensor.detach()
        numbers[str(name)] = tensor
    metrics = _to_floats(numbers)
    denominators = reader.denominators
    for name, names in denominators.terms.items():
        # Of the shard alone: the sum over shards has the exact sum of the terms.
        metrics[name] = math.fsum(metrics[n] for n in names if denominators.weights[n])
    multiplier = weight if terms_multiplier is None else terms_multiplier
    result = LossResult(loss.reshape(()), metrics, weight, multiplier, summed, outputs)
    if denominators.weights:
        result.denominators = denominators
        if terms_multiplier is None:
            denominators.divisor = weight
    return result


class _DenominatorReader:
    """Reads the weights of terms and metrics in the result of a loss function.

    Args:
        weight: the denominator of values without a weight of their own.
    """

    def __init__(self, weight: float) -> None:
        self.denominators = Denominators({})
        self._weight = weight

    def terms_of(self, loss: str, given: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the terms of a loss by name, and note their weights.

        Args:
            loss: "loss", or "d/loss" of a phase d, whose terms are named "d/...".
        """
        prefix, terms = loss.removesuffix(LOSS), dict[str, Any]()
        for name, value in given.items():
            if not isinstance(name, str) or name in ("", LOSS, "weight"):
                raise LossError(
                    "loss",
                    got=f"a term under the name {name!r}",
                    expected="terms by name, each a scalar or a dict with loss and weight",
                    fix='choose another name; "weight" belongs beside "loss", or in a term\'s dict',
                )
            label = f"{prefix}{name}"
            self.denominators.weights[label] = self._weight  # in the order of the terms
            terms[label] = self._value("term", label, value)
        if not terms:
            raise LossError("loss", got="no terms", expected="a scalar, or terms by name")
        self.denominators.terms[loss] = [*terms]
        return terms

    def scalars_of(self, values: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield metrics, and terms of losses of phases, as scalars."""
        for name, value in values.items():
            if not isinstance(value, Mapping):
                yield name, value
            elif LOSS not in value and str(name).endswith(f"/{LOSS}"):
                yield name, 0.0
                yield from self.terms_of(name, value).items()
            else:
                yield name, self._value("metric", str(name), value)

    def _value(self, kind: str, name: str, value: Any) -> Any:
        """Return a term or metric without the weight, and note the weight.

        Args:
            kind: "term" or "metric", for messages.
        """
        if not isinstance(value, Mapping):
            return value
        if value.keys() != {LOSS, "weight"}:
            raise LossError(
                f"{kind} {name!r}",
                got=f"a dict with {_names(value)}",
                expected='a scalar, or {"loss": mean, "weight": n}',
                fix="return further metrics beside the loss",
            )
        self.denominators.weights[name] = _weight(value["weight"])
        return value[LOSS]


def _loss(loss: object, name: str = LOSS, *, training: bool) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise LossError(
            name,
            got=_describe(loss),
            expected="a scalar tensor, the mean over the shard's rows",
            fix="reduce the loss, with .mean() for example",
        )
    if training and not loss.requires_grad:
        raise LossError(
            "loss",
            got=f"{_describe(loss)} that has no gradient",
            expected="a loss that depends on the model's parameters",
            fix="compute the loss with the model that the function receives, without detach() or "
            "no_grad()",
        )
    if training and not loss.is_floating_point():
        raise LossError("loss", got=_describe(loss), expected="a real number")
    return loss


def _tensor(value: Any) -> torch.Tensor | None:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _weight(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise LossError(
            "weight",
            got=_describe(value),
            expected="a number >= 0",
            fix="return how many rows, tokens or pixels the means are over",
        )
    return float(value)


def _to_floats(numbers: dict[str, torch.Tensor]) -> dict[str, float]:
    devices = {tensor.device.type for tensor in numbers.values()}
    if devices == {"cpu"}:
        return {name: float(tensor) for name, tensor in numbers.items()}
    # A single transfer, and so a single wait for the device.
    stacked = torch.stack([t.reshape(()).to(numbers["loss"].device) for t in numbers.values()])
    return dict(zip(numbers, map(float, stacked.tolist()), strict=True))


def _names(values: Mapping[Any, Any]) -> str:
    return ", ".join(repr(str(name)) for name in values) or "no names"


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"{type(value).__name__} {value!r:.60}"
