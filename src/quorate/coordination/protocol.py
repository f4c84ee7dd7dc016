"""What the coordinator is told, and what it asks for: events go in, effects come out.

A run of shards of one step, s to s + count - 1, may be dealt at once. It is answered at once: by
``Done`` of all, or by ``Failed`` of one or ``Cancelled``, and then nothing of it was computed.

They are not written once they are made. They are not frozen: a frozen one takes five times as long
to make, and an update of small shards makes half a dozen.

Legend: t step, s shard, w worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# --- events: what happened ------------------------------------------------------------------------


@dataclass(slots=True)
class Joined:
    """Worker w is ready to compute. Workers of one place are given neighbouring shards."""

    worker: int
    place: str = field(default="", compare=False, repr=False)  # "": the coordinator's own


@dataclass(slots=True)
class Left:
    """Worker w is gone."""

    worker: int
    reason: str
    crashed: bool = False  # by its own doing: what it was computing may be to blame
    results_stay: bool = False  # else whatever it had computed of the current step went with it


@dataclass(slots=True)
class Done:
    """Worker w has computed what it was given from shard s of step t on, and holds the results."""

    worker: int
    step: int
    shard: int


@dataclass(slots=True)
class Failed:
    """User code raised on worker w in shard s of step t; the worker lives."""

    worker: int
    step: int
    shard: int


@dataclass(slots=True)
class Cancelled:
    """Worker w left off what it was given from shard s of step t on, as it was told to."""

    worker: int
    step: int
    shard: int


@dataclass(slots=True)
class Applied:
    """The update of step t is made."""

    step: int


@dataclass(slots=True)
class Stop:
    """Finish what is under way, then end."""

    reason: str


@dataclass(slots=True)
class Tick:
    """Time has passed."""


Event = Joined | Left | Done | Failed | Cancelled | Applied | Stop | Tick

# --- effects: what to do --------------------------------------------------------------------------


@dataclass(slots=True)
class Compute:
    """Have worker w compute shards of step t, from s on; the reason is for people."""

    worker: int
    step: int
    shard: int
    reason: str
    rank_of: tuple[int, int] = field(default=(0, 1), compare=False)  # (its rank, of how many)
    instead_of: int | None = field(default=None, compare=False)  # the worker that is slow with it
    is_needed: bool = field(default=False, compare=False)  # no update of the step is without it
    count: int = 1  # of shards
    lost_with: int | None = field(default=None, compare=False)  # the worker that left with one


@dataclass(slots=True)
class Keep:
    """Worker w's results from shard s on count: add them to what w holds of step t."""

    worker: int
    step: int
    shard: int
    count: int = 1  # of shards


@dataclass(slots=True)
class Discard:
    """Worker w's results from shard s on do not count: others were first, or they are too late."""

    worker: int
    step: int
    shard: int
    count: int = 1  # of shards


@dataclass(slots=True)
class Cancel:
    """Tell worker w that what it was given from shard s of step t on is not wanted any more."""

    worker: int
    step: int
    shard: int


@dataclass(slots=True)
class Apply:
    """Collect what the holders hold of step t and apply the update; then report ``Applied``."""

    step: int
    holders: tuple[int, ...]
    shards: tuple[int, ...] = field(default=(), compare=False)  # that are in it
    staleness: int = field(default=0, compare=False)  # updates since its oldest parameters


@dataclass(slots=True)
class Replace:
    """Worker w has not answered for too long: end it, report ``Left``, and start another."""

    worker: int
    reason: str


@dataclass(slots=True)
class Wake:
    """Send a ``Tick`` at this time, unless something happens earlier."""

    at: float


@dataclass(slots=True)
class Abort:
    """Shard s of step t failed beyond repair, last on worker w: stop and report its error."""

    worker: int
    step: int
    shard: int


@dataclass(slots=True)
class Finish:
    """The run is over after ``step`` updates."""

    step: int
    reason: str


Effect = Compute | Keep | Discard | Cancel | Apply | Replace | Wake | Abort | Finish
