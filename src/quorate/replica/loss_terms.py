"""Terms of a loss: means over totals of their own, such as masked tokens beside rows.

Term k of shard s is the mean t_ks over n_ks rows, tokens or boxes. The loss of an update is

    sum_k (sum_s n_ks t_ks) / N_k      with N_k = sum_s n_ks

so a shard's gradient follows from the N_k of all shards. A first pass over the shards of a step
finds N_k, forward only. A second pass computes, in each of the V shards, the gradient of

    sum_k t_ks n_ks V / N_k

and each shard counts 1 in the sum of gradients. Shards whose terms have the same n_ks = n_s need no
second pass, if the totals are equal too: each shard weighs the gradient of sum_k t_ks by n_s. Nor
does a step of one shard, for N_k = n_ks.

Legend: V shards of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from quorate.errors import LossError

LOSS = "loss"
Scales = Mapping[str, float]  # V / N_k by name of a term; empty before the totals are known

# Relative difference of the totals of two passes: a GPU may add fractional weights in any order.
MOST_OFF = 1e-6


@dataclass
class Denominators:
    """The denominators of a shard's terms and metrics, or the sums over shards.

    Args:
        weights: by the names of all terms, and of the metrics with weights of their own.
        terms: by the name of a loss, the names of its terms.
        divisor: the denominator of the gradient.
        is_final: whether the gradient is right for any further shards.
    """

    weights: dict[str, float]
    terms: dict[str, list[str]] = field(default_factory=dict)
    divisor: float = 0.0
    is_final: bool = False

    @property
    def names(self) -> list[str]:
        """The names of all terms."""
        return [name for names in self.terms.values() for name in names]

    @property
    def awaits_totals(self) -> bool:
        """True if the gradient of the loss follows from a second pass only."""
        names = () if self.is_final else self.terms.get(LOSS, ())
        return any(self.weights[name] != self.divisor for name in names)

    def add(self, right: Denominators) -> Denominators:
        """Return self + right, in place.

        Raises:
            LossError: only some of the shards have terms.
        """
        if self.terms.keys() != right.terms.keys():
            names = ", ".join((self if self.terms else right).names)
            raise LossError(
                LOSS,
                got=f"terms ({names}) from one shard, and a loss without terms from another",
                expected="terms from every shard",
                fix="return the terms with weight 0 for a shard that has none of their tokens",
            )
        for name, weight in right.weights.items():
            self.weights[name] = self.weights.get(name, 0.0) + weight
        for loss, parts in right.terms.items():
            known = self.terms[loss]
            known += [name for name in parts if name not in known]
        self.divisor += right.divisor
        self.is_final = self.is_final and right.is_final
        return self

    def means(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the means of sums; the mean of a loss is the sum of its terms' means.

        A mean over nothing is 0 for a term, which adds nothing to the loss, and NaN for a metric.

        Args:
            sums: weighted sums, by name.
            weight: the denominator of all names without a weight of their own.
        """
        terms = frozenset(self.names)
        means: dict[str, float] = {}
        for name, value in sums.items():
            own = self.weights.get(name, weight)
            means[name] = value / own if own else 0.0 if name in terms else math.nan
        for loss, parts in self.terms.items():
            means[loss] = math.fsum(means[name] for name in parts)
        return means

    def scales(self, shards: int) -> dict[str, float]:
        """Return V / N_k of each term that has a total."""
        totals = {name: self.weights[name] for name in self.terms[LOSS]}
        return {name: shards / total for name, total in totals.items() if total}

    def require_same_totals(self, scales: Scales, shards: int) -> None:
        """Refuse totals of a second pass that differ from those of the first.

        Raises:
            LossError: a weight has changed.
        """
        now = self.scales(shards)
        for name in sorted(now.keys() | scales.keys()):
            first, second = (
                shards / found[name] if name in found else 0.0 for found in (scales, now)
            )
            if not math.isclose(first, second, rel_tol=MOST_OFF):
                raise LossError(
                    f"the weight of term {name!r}",
                    got=f"{second:.12g} over all shards when they were computed again",
                    expected=f"{first:.12g} as before",
                    fix="return the same weights for the same rows and random numbers",
                )


def combined(
    terms: Mapping[str, torch.Tensor], own: Denominators, scales: Scales | None
) -> tuple[torch.Tensor, float]:
    """Return the loss of a shard, and the number to multiply its gradient by.

    The number is 0 for a shard without a gradient: of no weight, or before the totals are known.
    Terms of weight 0 are left out: a mean over nothing may be NaN.

    Args:
        terms: () each, by name.
        own: receives the divisor of the gradient.
        scales: of the terms; None: the shard is a whole batch.
    """
    weights = {name: own.weights[name] for name in terms}
    counted = [name for name, weight in weights.items() if weight > 0]
    values = [terms[name] for name in counted]
    multiplier = 1.0 if counted else 0.0
    if scales is not None and not scales:
        numbers = {*weights.values()}
        own.divisor = multiplier = numbers.pop() if len(numbers) == 1 else 0.0
    else:
        own.is_final = True
        own.divisor = 1.0
        if scales is None:
            own.divisor = multiplier
        else:
            factors = [weights[name] * scales.get(name, math.nan) for name in counted]
            values = [value * factor for value, factor in zip(values, factors, strict=True)]
    if not values:
        return torch.zeros_like(next(iter(terms.values())).detach()), 0.0
    loss = values[0]
    for value in values[1:]:
        loss = loss + value.to(loss.device)
    return loss, multiplier
