"""Update rules: which gradients make an update, and how old they may be. A rule is a small class.

A step is computed from the parameters of one moment and applied later. How many updates are made
in between is its staleness. The coordinator asks a rule for three things: of how many shards a step
is made, how many of them must be in, and how stale it may be; transports do not know the rule. To
add one, write a class and list it in ``RULES``.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from quorate.errors import SettingError, nearest


class Rule(Protocol):
    """What the coordinator has to know of an update rule."""

    @property
    def name(self) -> str:
        """What the user types."""

    @property
    def staleness(self) -> float:
        """The most updates between parameters and gradient; 0: steps are computed one by one."""

    @property
    def by_shard(self) -> bool:
        """Whether each shard of a batch is a step, and so an update, of its own."""

    @property
    def least_shards(self) -> int:
        """How many shards a batch must have."""

    @property
    def copies(self) -> bool:
        """Whether an idle worker may compute what another is slow with, perhaps in vain."""

    def needed(self, shards: int) -> int:
        """Return how many shards of a step with ``shards`` must be in before the update."""


def keeps_bits(rule: Rule, shards: int) -> bool:
    """Return whether a run gives the same bits on any number of devices."""
    return not rule.by_shard and not rule.staleness and rule.needed(shards) == shards


class Sync:
    """All shards of a step: the update does not depend on who computed them."""

    name = "sync"
    form = name
    staleness = 0.0
    by_shard = False
    least_shards = 1
    copies = True

    def needed(self, shards: int) -> int:
        """Return V: all of them."""
        return shards


class Quorum:
    """The first R shards of a step; the rest are dropped whole (Chen et al., arXiv:1604.00981)."""

    form = "quorum:R"
    staleness = 0.0
    by_shard = False
    copies = True

    def __init__(self, least: int) -> None:
        if least < 1:
            raise ValueError("R must be at least 1")
        self.name = f"quorum:{least}"
        self.least_shards = least

    def needed(self, shards: int) -> int:
        """Return R, or all shards of a last batch that has fewer."""
        return min(self.least_shards, shards)


class Async:
    """Every shard's gradient as it comes, however old."""

    name = "async"
    form = name
    staleness = inf
    by_shard = True
    least_shards = 1
    copies = True  # there is other work until the very end

    def needed(self, shards: int) -> int:
        """Return all: a step has one shard."""
        return shards


class Bounded:
    """Every shard's gradient as it comes, but none older than K updates (Ho et al., NIPS 2013).

    Whoever would be too far ahead waits; nothing is computed that could not be applied.
    """

    form = "bounded:K"
    by_shard = True
    least_shards = 1
    copies = False

    def __init__(self, most: int) -> None:
        if most < 0:
            raise ValueError("K must be at least 0")
        self.name = f"bounded:{most}"
        self.staleness = float(most)

    def needed(self, shards: int) -> int:
        """Return all: a step has one shard."""
        return shards


RULES = (Sync, Quorum, Async, Bounded)


def parse(text: str) -> Rule:
    """Return the rule that a user named: ``sync``, or a name and a number as in ``quorum:3``.

    Raises:
        SettingError: there is no such rule.
    """
    name, colon, number = str(text).strip().partition(":")
    for rule in RULES:
        wanted, wants_number, _ = rule.form.partition(":")
        if name == wanted and colon == wants_number:
            try:
                return rule(*([_whole(number)] if colon else []))
            except ValueError as error:
                raise _no_rule(text, f"{rule.form} with a whole number: {error}") from None
    forms = {rule.form.partition(":")[0]: rule.form for rule in RULES}
    meant = nearest(name, forms)
    if meant is None:
        raise _no_rule(text, "choose one of them")
    has_number = ":" in forms[meant]
    form = f"{meant}:{number}" if has_number and number.strip().isdecimal() else forms[meant]
    raise _no_rule(text, f"did you mean {form}?")


def _whole(number: str) -> int:
    try:
        return int(number)
    except ValueError:
        raise ValueError(f"{number!r} is not a whole number") from None


def _no_rule(text: str, cure: str) -> SettingError:
    return SettingError("update", text, ", ".join(rule.form for rule in RULES), cure)
