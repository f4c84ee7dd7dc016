"""The contract of a loss function: ``loss(model, batch)`` and what it may return.

Either a scalar tensor, the mean over the shard's rows, or a dict with that under "loss", further
scalars under names of the user's choice (metrics, also means over rows), and, where the means are
over n tokens or pixels and not over rows, "weight": n. Names that are listed as totals may hold
counts: integers of any shape, which are summed and not averaged. Or what a model returned that
computes its own loss (a mapping of its own type, as Hugging Face's): of that the scalars count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from quorate.errors import LossError
from quorate.replica.outputs.rows import Piece
from quorate.replica.totals import NONE, Counts, Wanted, counts

__all__ = ["NONE", "Loss", "Outcome", "Wanted", "read"]

Loss = Callable[[torch.nn.Module, Any], Any]


@dataclass(frozen=True)
class Outcome:
    """A loss function's return value, checked."""

    loss: torch.Tensor  # ()
    metrics: dict[str, float]  # means; "loss" first
    weight: float
    totals: Counts = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)  # by name, what is collected; on the host

    def weighted(self) -> dict[str, float]:
        """Return weight * metrics; zero if the weight is, whatever a mean over nothing was."""
        if self.weight == 0:
            return dict.fromkeys(self.metrics, 0.0)
        return {name: self.weight * value for name, value in self.metrics.items()}

    def pieces(self) -> list[Piece]:
        """Return what is collected, if there is something; whoever asked knows of which shard."""
        return [Piece(0, 0, self.outputs)] if self.outputs else []


def read(returned: object, *, rows: int, training: bool, totals: Wanted = NONE) -> Outcome:
    """Check what a loss function returned for a shard of ``rows`` rows.

    Args:
        totals: names under which there are counts, or what is collected, if there is something. In
            training nothing is collected.

    Raises:
        LossError: the loss is no scalar or has no gradient, a metric is no scalar, counts are no
            integers, or the weight is negative or not finite.
        OutputError: what is to be collected is not by row.
    """
    if type(returned) is torch.Tensor and not totals:
        return Outcome(*_alone(returned, training=training), float(rows))
    values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    if "loss" not in values:
        raise LossError(
            f'the loss function returned a dict with {_names(values)}, without "loss"; '
            'put the scalar to be minimised under "loss"'
        )
    loss = _loss(values.pop("loss"), training=training)
    weight = _weight(values.pop("weight", rows))
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
    is_output = isinstance(returned, Mapping) and type(returned) is not dict
    for name, value in values.items():
        tensor = value if isinstance(value, torch.Tensor) else _tensor(value)
        if is_output and (tensor is None or tensor.numel() != 1):
            continue  # logits, hidden states
        if tensor is None or tensor.numel() != 1 or tensor.is_complex():
            raise LossError(
                f"metric {name!r} must be a scalar; got {_describe(value)}; reduce it, or list "
                "counts that are to be summed in Trainer(totals=...)"
            )
        tensor = tensor.detach()
        numbers[str(name)] = tensor
    return Outcome(loss.reshape(()), _to_floats(numbers), weight, summed, outputs)


def _alone(loss: torch.Tensor, *, training: bool) -> tuple[torch.Tensor, dict[str, float]]:
    """Check a loss that comes without anything else, and return it as a scalar, and its value."""
    loss = _loss(loss, training=training)
    return loss if loss.dim() == 0 else loss.reshape(()), {"loss": loss.item()}


def _loss(loss: object, *, training: bool) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise LossError(
            f"the loss must be a scalar tensor, the mean over the shard's rows; the loss function "
            f"returned {_describe(loss)}; reduce it, with .mean() for example"
        )
    if training and not loss.requires_grad:
        raise LossError(
            f"the loss has no gradient: the loss function returned {_describe(loss)} that depends "
            "on no parameter; compute it with the model it is given, without detach() or no_grad()"
        )
    if training and not loss.is_floating_point():
        raise LossError(f"the loss must be a real number; got {_describe(loss)}")
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
            f"weight: got {_describe(value)}, expected a number >= 0; return how many rows, tokens "
            "or pixels the means are over"
        )
    return float(value)


def _to_floats(numbers: dict[str, torch.Tensor]) -> dict[str, float]:
    devices = {tensor.device.type for tensor in numbers.values()}
    if devices == {"cpu"}:
        return {name: float(tensor) for name, tensor in numbers.items()}
    # One transfer, and so one wait for the device, for all of them.
    stacked = torch.stack([t.reshape(()).to(numbers["loss"].device) for t in numbers.values()])
    return dict(zip(numbers, map(float, stacked.tolist()), strict=True))


def _names(values: Mapping[Any, Any]) -> str:
    return ", ".join(repr(str(name)) for name in values) or "no names"


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"{type(value).__name__} {value!r:.60}"
