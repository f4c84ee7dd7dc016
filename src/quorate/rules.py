"""Update rules: which shards of a step make an update. A rule is a small class.

The coordinator asks; transports do not know the rule.
"""

from __future__ import annotations

from typing import Protocol

from quorate.errors import SettingError


class Rule(Protocol):
    """How many shards of a step make its update."""

    name: str  # what the user types

    def needed(self, shards: int) -> int:
        """Of a step with ``shards`` shards, how many must be in before the update."""


class Sync:
    """All shards of a step: the update does not depend on who computed them."""

    name = "sync"

    def needed(self, shards: int) -> int:
        return shards


def parse(text: str) -> Rule:
    """The rule that a user named.

    Raises:
        SettingError: there is no such rule.
    """
    if text == Sync.name:
        return Sync()
    raise SettingError("update", text, "sync", "other rules are not supported yet")
