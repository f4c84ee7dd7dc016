"""Totals: sums over shards that are not averaged, and the numbers computed from the sums.

Intersection over union, BLEU, a median: none of them is a mean of the shards' values. Each follows
from counts, and counts add up: a confusion matrix, matching n-grams, a histogram. Sums of integers
are the same in any order, on any number of workers, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch

from quorate.errors import LossError, SettingError
from quorate.replica.outputs.collect import Collect
from quorate.replica.outputs.metric import UserMetric, is_metric

Finish = Callable[[torch.Tensor], Any]  # from a total to a number, or to numbers by name
Counts = dict[str, torch.Tensor]  # by name; int64, on the host
# By name: the collecting object for evaluations; None for counts.
Wanted = Mapping[str, Collect | UserMetric | None]
NONE: Wanted = MappingProxyType({})

# The dtypes within int64. Not bool: the sum of a mask has to be returned instead.
DTYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32),
)


class Totals:
    """The user's totals, and the functions that finish them.

    Args:
        finish: by name of the counts in the loss function's result: a function from their total to
            a number, or to several numbers by name; ``Collect``, or a metric.

    Raises:
        SettingError: the argument is no such mapping.
    """

    def __init__(self, finish: Mapping[str, Any] | None) -> None:
        listed: Any = {} if finish is None else finish
        if not isinstance(listed, Mapping):
            expected = "a dict from names to functions"
            raise SettingError("totals", type(listed).__name__, expected, 'as {"confusion": iou}')
        self.kept: dict[str, Collect | UserMetric] = {}
        for name, function in listed.items():
            if not isinstance(name, str) or name in ("", "loss", "weight"):
                expected = "the name of a metric other than loss and weight"
                raise SettingError("totals", name, expected, "choose another name")
            if isinstance(function, Collect):
                self.kept[name] = function
            elif is_metric(function):
                self.kept[name] = UserMetric(name, function)
            elif not callable(function):
                expected = "a function from the total, an int64 tensor, to a number or a dict"
                got = type(function).__name__
                raise SettingError(f"totals[{name!r}]", got, expected, "see help(quorate.Trainer)")
        self._finish: dict[str, Finish] = {n: f for n, f in listed.items() if n not in self.kept}
        self.wanted: Wanted = {name: self.kept.get(name) for name in listed}

    def finished(self, totals: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the numbers computed from totals, by name.

        Raises:
            LossError: a function returned something else than numbers, or two numbers have the same
                name.
            Exception: an error of the user's function, with a note that names the total.
        """
        found: dict[str, float] = {}
        for name, finish in self._finish.items():
            if name not in totals:
                continue
            try:
                returned = finish(totals[name].clone())
            except Exception as error:
                shape = tuple(totals[name].shape)
                error.add_note(f"quorate: in totals[{name!r}], of a total of shape {shape}")
                raise
            found |= numbers(name, returned, found)
        return found


def numbers(name: str, returned: Any, taken: Collection[str] = ()) -> dict[str, float]:
    """Return the numbers computed from a total, by name.

    Args:
        name: name of the total; a list yields numbers name_0, name_1, ...
        taken: names in use.

    Raises:
        LossError: the result is no number, or a name is in use.
    """
    if isinstance(returned, list):
        returned = {f"{name}_{at}": value for at, value in enumerate(returned)}
    found: dict[str, float] = {}
    for each, value in (returned if isinstance(returned, Mapping) else {name: returned}).items():
        if not isinstance(each, str) or each in ("", "loss") or each in taken:
            raise LossError(
                f"totals[{name!r}]",
                got=f"a number under the name {each!r}",
                expected="a name that no other metric has",
                fix="rename the number",
            )
        found[each] = _number(name, each, value)
    return found


def merge_metrics(means: Mapping[str, float], finished: Mapping[str, float]) -> dict[str, float]:
    """Return all metrics of an update or an evaluation.

    Raises:
        LossError: a mean and a finished total have the same name.
    """
    if not finished:
        return dict(means)
    if taken := sorted(means.keys() & finished.keys()):
        raise LossError(
            "totals",
            got=f"a number under the name {taken[0]!r}",
            expected="a name that no mean of the loss function has",
            fix="rename one of the two",
        )
    return {**means, **finished}


def counts(name: str, value: object) -> torch.Tensor:
    """Return a copy of one shard's counts, (any shape) int64 on the host.

    Raises:
        LossError: the counts are no integers.
    """
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or tensor.dtype not in DTYPES:
        got = type(value).__name__ if tensor is None else f"dtype {tensor.dtype}"
        raise LossError(
            f"total {name!r}",
            got=got,
            expected="a tensor of integers, which add up exactly",
            fix="return counts, with torch.bincount, .sum() or .long() for example",
        )
    return tensor.to("cpu", torch.int64, copy=True)


def add(left: Counts, right: Counts) -> None:
    """Add totals in place: left += right.

    Raises:
        LossError: names or shapes differ.
    """
    if left.keys() != right.keys():
        raise LossError(
            "totals",
            got=f"{sorted(left)} from one shard and {sorted(right)} from another",
            expected="the same names from every shard",
            fix="return each total for every shard",
        )
    for name, total in left.items():
        if total.shape != right[name].shape:
            raise LossError(
                f"total {name!r}",
                got=f"shape {tuple(total.shape)} from one shard and {tuple(right[name].shape)} "
                "from another",
                expected="the same shape from every shard",
                fix="torch.bincount, for example, needs minlength",
            )
        total += right[name]


def _number(total: str, name: str, value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if not isinstance(value, Real):
        raise LossError(
            f"totals[{total!r}]",
            got=f"{type(value).__name__} {value!r:.60} for {name!r}",
            expected="a number, or a dict of numbers by name",
        )
    return float(value)
