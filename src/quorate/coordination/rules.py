"""Update rules: the gradients of an update, and how old they may be. A rule is a small class.

The staleness of a gradient is the number of updates between its parameters and its application. The
coordinator asks a rule how many shards make a step, how many of them the update needs, and how
stale a gradient may be; engines do not know the rule. To add a rule, write a class and list the
class in ``RULES``.
"""

from __future__ import annotations

from math import inf

from quorate.errors import SettingError, nearest


class Rule:
    """The coordinator's view of an update rule.

    Attributes:
        form: the form of the name on the command line.
        name: the name on the command line.
        staleness: the most updates between parameters and gradient; 0: a single step is open.
        by_shard: True if each shard of a batch is a step, and so an update, of its own.
        least_shards: the least number of shards of a batch.
        copies: True if an idle worker may compute a slow worker's shard too, perhaps in vain.
    """

    form: str
    name: str
    staleness = 0.0
    by_shard = False
    least_shards = 1
    copies = True

    def needed(self, shards: int) -> int:
        """Return how many shards of a step with ``shards`` must be in before the update."""
        return shards


def keeps_bits(rule: Rule, shards: int) -> bool:
    """Return whether a run gives the same bits on any number of devices."""
    return not rule.by_shard and not rule.staleness and rule.needed(shards) == shards


class Sync(Rule):
    """All shards of a step: the update does not depend on who computed them."""

    form = name = "sync"


class Quorum(Rule):
    """The first R shards of a step; the rest are dropped whole (Chen et al., arXiv:1604.00981)."""

    form = "quorum:R"

    def __init__(self, least: int) -> None:
        if least < 1:
            raise ValueError("R must be at least 1")
        self.name = f"quorum:{least}"
        self.least_shards = least

    def needed(self, shards: int) -> int:
        """Return R, or all shards of a smaller last batch."""
        return min(self.least_shards, shards)


class Async(Rule):
    """Every shard's gradient on arrival, however old."""

    form = name = "async"
    staleness = inf
    by_shard = True  # copies: there is other work until the very end


class Bounded(Rule):
    """Every shard's gradient on arrival, but none older than K updates (Ho et al., NIPS 2013).

    A worker too far ahead waits; nothing is computed in vain.
    """

    form = "bounded:K"
    by_shard = True
    copies = False

    def __init__(self, most: int) -> None:
        if most < 0:
            raise ValueError("K must be at least 0")
        self.name = f"bounded:{most}"
        self.staleness = float(most)


RULES = (Sync, Quorum, Async, Bounded)


def parse(text: str) -> Rule:
    """Return the rule of a name: ``sync``, or a name and a number as in ``quorum:3``.

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
