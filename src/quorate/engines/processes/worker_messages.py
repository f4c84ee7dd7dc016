"""Messages between a worker process, the coordinator, the fork server, and the relay of a node.

to a worker            StartWorker ShareMemory OpenJob ComputeShards CloseJob EndWorker
from a worker          ScriptRefused ScriptRaised ReachedLoop FoundNote JobReady
                       ShardsDone ShardFailed ShardsCancelled
to a fork server       ForkWorker
from a fork server     WorkerForked WorkerExited
to a relay             RelayOrder: StartProcess CancelShards KillProcess, or a message to a worker
from a relay           RelayNews: NodeFacts WorkerForked WireCut WorkerEnded, or one from a worker

A pool of several machines reports WorkerPlaced and WorkerLeaves itself. A descriptor of memory
travels beside a message, in the order of the fields that name one. Memory travels to and from a
relay as images, the arrays of a call of Ray; Ray itself pickles the frame of a call.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quorate.engines.collective.rank_place import RankPlace
from quorate.engines.messages import MessageReader
from quorate.engines.processes.arena import ArenaDescription, ArenaPart
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.script import Script
from quorate.engines.tracing import Batch
from quorate.engines.worker_status import Doing
from quorate.replica.notes import Note
from quorate.replica.shard_sum import ShardSum
from quorate.replica.sparse.rows import Rows


class _Message(msgspec.Struct, tag=True, omit_defaults=True):
    """A message, with the name of the class as the tag."""


# --- to a worker ----------------------------------------------------------------------------------


class OwnProcess(msgspec.Struct):
    """Facts of the script's own process for workers, see ``script_as_worker``."""

    has_input: bool
    writes: list[tuple[int, int]]  # device and inode of files open for writing


class StartWorker(_Message):
    """The first message: run the script up to the training loop."""

    number: int
    script: Script
    place: RankPlace | None  # in a collective, if the worker is to be a rank
    own: OwnProcess


class ShareMemory(_Message):
    """Map the coordinator's memory. Comes with the descriptors of ``Arena.handed_over``."""

    computing: dict[str, Any]  # see ``Computing``: found out by the coordinator
    description: ArenaDescription


class ModelRequest(_Message, kw_only=True):
    """A request with user code's changes of the model, unless the worker knows the changes."""

    model_changes: dict[str, Any] | None = None  # see ``ModelChanges.to_json``
    shared: dict[str, Any] | None = None  # ``SharedValues.to_json``; perhaps with a descriptor


class OpenJob(ModelRequest):
    """Join a job, and answer ``JobReady``."""

    job: int
    work: str  # the ``class_name`` of the job
    averaged: bool  # whether shards are computed from averaged parameters
    plan: dict[str, Any]
    steps: tuple[int, int]  # first and end
    options: dict[str, Any]  # see ``Job.options``
    traced: tuple[int, int]  # first and end of the steps whose spans are recorded
    dataset: str | None
    compares_data: bool
    compares_gradient: bool  # comes with a descriptor of the parameters to compute from


class ComputeShards(ModelRequest):
    """Compute consecutive shards of a step."""

    job: int
    ticket: int  # names the request
    step: int
    shard: int  # the first
    slots: list[int | None]  # by shard: of the arena; None: the shard yields no vectors
    snapshot: tuple[int, int] | None  # slot and version of the parameters to compute from
    rank_of: tuple[int, int]  # rank of the worker, and number of workers
    beside: list[dict[str, Any] | None] | None = None  # by shard, see ``Job.beside``
    # For a relay: V of the step if the result may be added to other results, else 1; and step and
    # shard of the next request, if known.
    leaves: int = 1
    following: tuple[int, int] | None = None


class CancelShards(_Message):
    """Abandon a request. A worker that sees the coordinator's arena needs no such message."""

    ticket: int


class CloseJob(_Message):
    """Forget a job."""

    job: int


class EndWorker(_Message):
    """End the process."""


# --- from a worker --------------------------------------------------------------------------------


class ScriptRefused(_Message):
    """The script has a mistake, and no process of the worker can take part."""

    message: str


class ScriptRaised(_Message):
    """The script raised an exception before the training loop."""

    error: BaseException
    line: str  # of user code
    printed: str  # the end of the output


class ReachedLoop(_Message):
    """The script has reached the training loop."""


class FoundNote(_Message):
    """A note for the user."""

    note: Note


class JobReady(_Message):
    """The worker can join a job, with fingerprints to compare."""

    job: int
    data: str | None = None
    gradient: str | None = None
    error: BaseException | None = None  # raised while the gradient was computed


class SlotSum(ShardSum):
    """A shard's result, or a sum of results, whose vectors lie in a slot of the arena.

    A message has no vectors.
    """

    slot: int | None = None
    rows: dict[str, Rows] = msgspec.field(default_factory=dict)  # of the gradient, in a message


class ShardAnswer(_Message, kw_only=True):
    """The answer to a request."""

    job: int
    ticket: int
    spans: Batch | None = None  # None: nothing is traced
    # From a relay: workers of the node and their answers, whose results are added to this one's.
    others: list[tuple[int, ShardsDone]] = []


class ShardsDone(ShardAnswer):
    """The shards are computed."""

    results: list[SlotSum]  # in the order of shards, perhaps sums over subtrees
    outputs: list[Any] = []  # of an evaluation or prediction: one parcel
    # With the tensors of the outputs. On the wire True: comes with a descriptor. Then a
    # ``Segment``, or bytes if the worker is on a different host.
    memory: Any = None
    is_held: bool = False  # whether servers have the gradient


class ShardFailed(ShardAnswer):
    """User code raised an exception in a shard."""

    shard: int
    error: BaseException


class ShardsCancelled(ShardAnswer):
    """The shards were abandoned."""


# --- from a pool of several machines, in the coordinator's process --------------------------------


class WorkerPlaced(_Message):
    """A machine has room for the worker."""


class WorkerLeaves(_Message):
    """A healthy worker has to end."""

    reason: str  # "has left host, because ..."


# --- to and from fork servers ---------------------------------------------------------------------


class ForkWorker(_Message):
    """Fork a worker. Comes with three descriptors: for reports, the worker's wire, its output."""

    path: list[str]  # sys.path
    environment: dict[str, str]


class WorkerForked(_Message):
    """The worker's process. Comes with a descriptor of the process."""

    pid: int


class WorkerExited(_Message):
    """The worker's process has ended, or could not be forked."""

    code: int  # -n after signal n
    error: str | None = None  # why there is no process


# --- to and from relays ---------------------------------------------------------------------------


class StartProcess(_Message):
    """Start a worker's process in an environment."""

    number: int  # of the worker
    environment: dict[str, str]


class KillProcess(_Message):
    """Kill a worker's process."""


class NodeFacts(_Message):
    """The first news of a relay: facts to compare, see ``same_everywhere``."""

    same: dict[str, str]


class WireCut(_Message):
    """The worker's wire is cut."""


class WorkerEnded(_Message):
    """The worker's process has ended."""

    ending: Ending


ForModel = OpenJob | ComputeShards
Answer = ShardsDone | ShardFailed | ShardsCancelled
_Request = ShareMemory | OpenJob | ComputeShards | CancelShards | CloseJob | EndWorker
_News = ScriptRefused | ScriptRaised | ReachedLoop | FoundNote | JobReady
_OfStart = StartWorker | ForkWorker | WorkerForked | WorkerExited | WorkerPlaced
_OfRelay = StartProcess | KillProcess | NodeFacts | WireCut | WorkerEnded
WorkerMessage = _OfStart | _Request | _News | Answer | WorkerLeaves | _OfRelay
JobNews = Answer | FoundNote

Part = tuple[ArenaPart, int | None]  # of the coordinator's arena, and the slot of the part, if any


class RelayOrder(msgspec.Struct):
    """An order to a relay on behalf of a worker, or a message to the worker."""

    message: WorkerMessage
    parts: list[Part]  # of the images of the call


class RelayNews(msgspec.Struct):
    """News of a relay, with the status of the worker, and perhaps with an image."""

    life: int | None  # names the worker's process
    message: WorkerMessage | None
    doing: Doing | None = None  # ``since`` is an age: clocks of two hosts have nothing in common
    ahead: tuple[int, int] | None = None
    image: Part | None = None


ORDER_READER: MessageReader[RelayOrder] = MessageReader(RelayOrder)
NEWS_READER: MessageReader[RelayNews] = MessageReader(RelayNews)
READER: MessageReader[WorkerMessage] = MessageReader(WorkerMessage)
