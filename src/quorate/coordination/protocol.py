"""Events received by the coordinator, and effects requested by the coordinator.

A run of consecutive shards of one step, s to s + count - 1, may be dealt at once. The worker
answers once for the whole run: with ``Done``, or with ``Failed`` or ``Cancelled``, after which none
of the run counts as computed.

Do not modify events and effects. They are structs, because a dataclass takes 2.5 times as long to
create, and an update of small shards creates half a dozen.

Legend: t step, s shard, w worker.
"""

from __future__ import annotations

from msgspec import Struct


class OfShard(Struct, repr_omit_defaults=True):
    """An event or effect that concerns worker w and shards of step t from s on."""

    worker: int
    step: int
    shard: int


# --- events: what happened ------------------------------------------------------------------------


class Joined(Struct, repr_omit_defaults=True):
    """Worker w is ready to compute. Workers of the same place receive neighboring shards."""

    worker: int
    #: place of the worker, such as a host; "" for the place of the coordinator
    place: str = ""


class Left(Struct, repr_omit_defaults=True):
    """Worker w has ended or was lost."""

    worker: int
    reason: str
    #: whether the worker crashed by itself: its shard may be the cause
    crashed: bool = False
    #: whether the results of the current step remain; otherwise they are lost
    results_stay: bool = False


class Done(OfShard):
    """Worker w has computed the dealt shards of step t from s on, and holds the results."""


class Failed(OfShard):
    """User code raised an exception on worker w in shard s of step t; the worker still runs."""


class Cancelled(OfShard):
    """Worker w has abandoned the dealt shards of step t from s on, after ``Cancel``."""


class Applied(Struct, repr_omit_defaults=True):
    """The update of step t was applied."""

    step: int


class Stop(Struct, repr_omit_defaults=True):
    """A request to finish the current step, and then end."""

    reason: str


class Tick(Struct, repr_omit_defaults=True):
    """Time has passed."""


Event = Joined | Left | Done | Failed | Cancelled | Applied | Stop | Tick

# --- effects: what to do --------------------------------------------------------------------------


class Compute(OfShard):
    """Let worker w compute shards of step t from s on; ``reason`` is text for people."""

    reason: str
    #: rank of the worker, and number of workers
    rank_of: tuple[int, int] = (0, 1)
    #: the slow worker whose shard is copied
    instead_of: int | None = None
    #: whether the update of the step cannot be made without these shards
    is_needed: bool = False
    count: int = 1  #: number of shards
    #: the worker that left while it had one of these shards
    lost_with: int | None = None


class Keep(OfShard):
    """Accept worker w's results from shard s on: add the results to w's sum of step t."""

    count: int = 1  #: number of shards


class Discard(OfShard):
    """Reject worker w's results from shard s on: another copy was first, or w is too late."""

    count: int = 1  #: number of shards


class Cancel(OfShard):
    """Tell worker w that its dealt shards of step t from s on are no longer needed."""


class Apply(Struct, repr_omit_defaults=True):
    """Collect the sums of step t from the holders, apply the update, and report ``Applied``."""

    step: int
    holders: tuple[int, ...]
    #: the shards in the update
    shards: tuple[int, ...] = ()
    #: updates since the oldest parameters that a shard was computed from
    staleness: int = 0


class Replace(Struct, repr_omit_defaults=True):
    """End worker w, which does not respond; report ``Left``, and start a new worker."""

    worker: int
    reason: str


class Wake(Struct, repr_omit_defaults=True):
    """Send a ``Tick`` at time ``at``, unless an event arrives earlier."""

    at: float


class Abort(OfShard):
    """Stop the run and report the error of shard s of step t, which last failed on worker w."""


class Finish(Struct, repr_omit_defaults=True):
    """The run is over after ``step`` updates."""

    step: int
    reason: str


WorkerEffect = Compute | Keep | Discard | Cancel | Replace  # carried out by the channel of a job
Effect = WorkerEffect | Apply | Wake | Abort | Finish
