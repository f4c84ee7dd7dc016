"""Records: the records of a run as lines of JSON, in a folder. One file per writer.

A file is opened for each line, because a writer may be killed at any moment. Digests of tensors are
texts by ``tensor_text``; equal texts mean equal bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quorate.replica.witness.calls import Call, CallRecord
from quorate.replica.witness.module_trace import Event

COORDINATOR = "coordinator"
ENDED = "ended"  # a file that exists once the recording is over


@dataclass(frozen=True)
class ShardRecord:
    """A computed shard; a shard may have been computed several times."""

    worker: int
    device: str
    step: int
    shard: int
    rows: list[int]
    samples: list[str]  # a hash of each row's content
    batch: str  # a hash of the result of collate and augment
    forward: list[Event]  # in the order of calls
    backward: list[Event]  # one per returned tensor; several devices mix the order
    metrics: dict[str, float]  # weighted; "loss" first
    gradient: dict[str, str]  # by parameter, in the model's order
    buffers: str


@dataclass(frozen=True)
class StepRecord:
    """The state after an update; number 0 is the state before the first update."""

    number: int
    step: int  # of the plan; -1 before the first update
    lrs: list[float]  # of the next update; of all groups of all optimizers
    tensors: dict[str, str]  # the model's state dict, in its order
    computed_by: dict[int, int] = field(default_factory=dict)  # shard -> worker whose copy was used


@dataclass(frozen=True)
class TwiceRecord:
    """A shard loaded and computed twice by one worker; or shards computed in stages and whole."""

    worker: int
    device: str
    step: int
    shard: int
    rows: list[int]  # rows of the shard with different content the second time
    operators: int  # number of calls
    differs: list[str]  # differing results: metrics, parameters whose gradient differs
    call: CallRecord | None
    batch_differs: bool = False  # despite equal content of the rows
    calls: list[Call] = field(default_factory=list)  # of the first computation, in order
    results: dict[str, str] = field(default_factory=dict)  # of the first computation, by name
    # The number of shards from ``shard`` on with different results in stages and in one piece,
    # named in ``differs``. 0: both computations were in one piece.
    in_stages: int = 0

    @property
    def is_finding(self) -> bool:
        """True if anything differed the second time."""
        return bool(self.rows or self.batch_differs or self.differs)


@dataclass(frozen=True)
class EndRecord:
    """The end of a recording: later events were not recorded."""

    updates: int
    error: str  # the error that ended the run, or empty
    doubts: list[str] = field(default_factory=list)  # the run's own reasons why its bits may differ


@dataclass
class Recording:
    """All records of one run."""

    facts: dict[str, Any] = field(default_factory=dict)  # as in a checkpoint
    updates: list[StepRecord] = field(default_factory=list)  # from number 0 on
    shards: dict[tuple[int, int], list[ShardRecord]] = field(default_factory=dict)
    twice: list[TwiceRecord] = field(default_factory=list)
    end: EndRecord | None = None

    def part(self, first: int, last: int) -> Recording:
        """Return the recording with only the updates from ``first`` to ``last``, included."""
        return replace(self, updates=[u for u in self.updates if first <= u.number <= last])

    def moved(self, by: int) -> Recording:
        """Return the recording with shifted update numbers, for a resumed run."""
        return replace(self, updates=[replace(u, number=u.number + by) for u in self.updates])


def note(folder: Path, writer: str, record: Any) -> None:
    """Add a record, a dataclass of this file or the run's facts, to a writer's file."""
    kind = "facts" if isinstance(record, dict) else type(record).__name__
    fields = record if isinstance(record, dict) else asdict(record)
    with (folder / f"{writer}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **fields}) + "\n")
    if isinstance(record, EndRecord):
        (folder / ENDED).touch()


def has_ended(folder: Path) -> bool:
    """Return whether the recording is over. Cheap enough for frequent calls."""
    return (folder / ENDED).exists()


def read(folder: Path) -> Recording:
    """Return the records in a folder so far."""
    recording = Recording()
    for record in _lines(folder):
        match record.pop("kind"):
            case "facts":
                recording.facts = record
            case "StepRecord":
                pairs = record["computed_by"].items()
                record["computed_by"] = {int(shard): worker for shard, worker in pairs}
                recording.updates.append(StepRecord(**record))
            case "ShardRecord":
                for name in ("forward", "backward"):
                    record[name] = [Event(**event) for event in record[name]]
                shard = ShardRecord(**record)
                recording.shards.setdefault((shard.step, shard.shard), []).append(shard)
            case "TwiceRecord":
                if (call := record.pop("call")) is not None:
                    call = CallRecord(**{**call, "values": tuple(call["values"])})
                traced = [Call(**called) for called in record.pop("calls")]
                recording.twice.append(TwiceRecord(**record, call=call, calls=traced))
            case "EndRecord":
                recording.end = EndRecord(**record)
    return recording


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # torn: the writer was killed
                continue
