"""Metrics with states, as of torchmetrics: updated per shard, and merged in the order of rows.

Each shard updates a clone that begins empty, and yields the states of the clone; the states of all
shards are merged by the reductions that the metric declares. So the result does not depend on the
workers, and because the order is fixed, neither does the rounding of sums of floats. torchmetrics
is not imported: a metric is recognised by its attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from quorate.errors import OutputError, SettingError
from quorate.replica.nested import tensors

# By the names of torchmetrics' functions; None means a list, or tensors stacked for the metric.
MERGED = ("dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min")
_SIMPLE = (bool, int, float, str, type(None))


def is_metric(value: object) -> bool:
    """Return whether an object has states with reductions, like a metric of torchmetrics."""
    names = ("_defaults", "_reductions", "update", "compute", "reset")
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


class UserMetric:
    """A metric of the user.

    Args:
        name: name of the metric among the totals.
        metric: the user's object, never updated itself.

    Raises:
        SettingError: the metric has no states, or a state without a merging reduction.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self._metric = metric
        self._states: dict[str, str] = {}  # the name of the reduction; "" without a reduction
        where, kind = f"totals[{name!r}]", type(metric).__name__
        for state, reduction in metric._reductions.items():
            word = "" if reduction is None else getattr(reduction, "__name__", "a function")
            if word and word not in MERGED:
                expected = "states that are summed, concatenated, or of which the max or min counts"
                fix = "collect its inputs: quorate.Collect(function)"
                raise SettingError(where, f"{kind}, with {state} by {word}", expected, fix)
            self._states[state] = word
        if not self._states:
            expected = "a metric with states of its own"
            fix = "list the metrics that are in it, or use quorate.Collect(function)"
            raise SettingError(where, f"{kind}, which has none", expected, fix)

    def of(self, name: str, value: object, rows: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the states after a shard, on the host.

        Args:
            value: the arguments of ``update``: a tuple, a dict of named arguments, or a single
                argument.

        Raises:
            OutputError: ``update`` sets an attribute beside the states.
            Exception: an error of the metric.
        """
        metric = self._empty()
        device = next((tensor.device for tensor in tensors(value)), torch.device("cpu"))
        metric.to(device)
        before = self._beside(metric)
        arguments = (
            value if isinstance(value, tuple) else () if isinstance(value, dict) else (value,)
        )
        named: Mapping[str, Any] = value if isinstance(value, dict) else {}
        metric.update(*arguments, **named)
        after = self._beside(metric)
        if changed := sorted(key for key in after if after[key] != before.get(key, before)):
            raise OutputError(
                f"total {name!r}",
                f"{type(metric).__name__}.update() sets {changed[0]}, which is not one of the "
                "metric's states "
                "and would be lost",
                fix="set this attribute where the metric is made, or use quorate.Collect(function)",
            )
        return {state: _on_host(getattr(metric, state)) for state in self._states}

    def merged(self, left: dict[str, Any] | None, right: dict[str, Any]) -> dict[str, Any]:
        """Return the merged states of the shards so far and the next shard. ``left`` is changed."""
        if left is None:
            return {state: _first(word, right[state]) for state, word in self._states.items()}
        for state, word in self._states.items():
            left[state] = _merge(word, left[state], right[state])
        return left

    def finished(self, states: dict[str, Any]) -> Any:
        """Return the metric's result for merged states."""
        metric = self._empty()
        for state, word in self._states.items():
            value = states[state]
            if isinstance(value, _ShardTensors):
                value = torch.cat(value.all) if word else torch.stack(value.all)
            setattr(metric, state, value)
        metric._update_count = 1  # without an update the metric would warn
        # The states are complete: other ranks must not be contacted.
        metric.sync_on_compute = False
        metric._to_sync = False
        computed = metric.compute()
        if isinstance(computed, torch.Tensor) and computed.ndim == 1 and computed.numel() > 1:
            return list(computed)
        return computed

    def _empty(self) -> Any:
        metric = copy.deepcopy(self._metric)
        metric.reset()
        return metric

    def _beside(self, metric: Any) -> dict[str, Any]:
        """Return the attributes beside states, as far as they can be compared."""
        return {
            key: value
            for key, value in vars(metric).items()
            if key not in self._states and not key.startswith("_") and isinstance(value, _SIMPLE)
        }


class _ShardTensors:
    """Tensors of all shards, to be joined at the end."""

    def __init__(self, first: torch.Tensor) -> None:
        self.all = [first.clone()]


def _on_host(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    return [_on_host(each) for each in state]


def _first(word: str, state: Any) -> Any:
    if isinstance(state, list):
        return [each.clone() for each in state]
    return _ShardTensors(state) if word in ("", "dim_zero_cat") else state.clone()


def _merge(word: str, left: Any, right: Any) -> Any:
    if isinstance(right, list):
        return left + [each.clone() for each in right]
    if isinstance(left, _ShardTensors):
        left.all.append(right.clone())
        return left
    if word == "dim_zero_max":
        return torch.maximum(left, right)
    if word == "dim_zero_min":
        return torch.minimum(left, right)
    return left + right
