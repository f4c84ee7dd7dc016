"""Records: what is noted of a run, as lines of JSON, in a folder. One file per writer.

A file is opened for each line: a writer may be killed at any moment, and owns nothing. Where
digests are of tensors, they are texts by ``tensor_text``; equal texts, equal bits.
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
ENDED = "ended"  # a file that is there when the recording is over


@dataclass(frozen=True)
class ShardRecord:
    """One shard that was computed; it may have been computed several times."""

    worker: int
    device: str
    step: int
    shard: int
    rows: list[int]
    samples: list[str]  # a hash of each row's content
    batch: str  # a hash of what collate and augment made of them
    forward: list[Event]  # in the order of calls
    backward: list[Event]  # one per tensor that was returned; several devices mix their order
    metrics: dict[str, float]  # weighted; "loss" first
    gradient: dict[str, str]  # by parameter, in the model's order
    buffers: str


@dataclass(frozen=True)
class UpdateRecord:
    """The state after an update; after none, with number 0."""

    number: int
    step: int  # of the plan; -1 before the first update
    lr: float  # of the next one
    tensors: dict[str, str]  # the model's state dict, in its order
    computed_by: dict[int, int] = field(default_factory=dict)  # shard -> worker whose copy counted


@dataclass(frozen=True)
class TwiceRecord:
    """One shard, loaded and computed twice by the same worker; or shards, in stages and without."""

    worker: int
    device: str
    step: int
    shard: int
    rows: list[int]  # of the shard whose content was another the second time
    operators: int  # calls
    differs: list[str]  # of the results: metrics, parameters whose gradient did
    call: CallRecord | None
    batch_differs: bool = False  # though its rows had the same content twice
    calls: list[Call] = field(default_factory=list)  # of the first computation, in order
    results: dict[str, str] = field(default_factory=dict)  # of it, by name
    # Shards from ``shard`` on that stages and one piece computed otherwise: ``differs`` says what.
    # 0: both computations were in one piece.
    in_stages: int = 0

    @property
    def is_finding(self) -> bool:
        """Whether something was another the second time."""
        return bool(self.rows or self.batch_differs or self.differs)


@dataclass(frozen=True)
class EndRecord:
    """The recording is over: what came after it was not recorded."""

    updates: int
    error: str  # that ended it, if one did
    doubts: list[str] = field(default_factory=list)  # why the run itself says its bits may differ


@dataclass
class Recording:
    """All that is noted of one run."""

    facts: dict[str, Any] = field(default_factory=dict)  # as in a checkpoint
    updates: list[UpdateRecord] = field(default_factory=list)  # from number 0 on
    shards: dict[tuple[int, int], list[ShardRecord]] = field(default_factory=dict)
    twice: list[TwiceRecord] = field(default_factory=list)
    end: EndRecord | None = None

    def part(self, first: int, last: int) -> Recording:
        """Return it with the updates of these numbers, both included, and all that was computed."""
        return replace(self, updates=[u for u in self.updates if first <= u.number <= last])

    def moved(self, by: int) -> Recording:
        """Return it as that of a run that goes on after so many updates."""
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
    """Return whether the recording is over. Cheap enough to be asked again and again."""
    return (folder / ENDED).exists()


def read(folder: Path) -> Recording:
    """Return what is noted in a folder so far."""
    recording = Recording()
    for record in _lines(folder):
        match record.pop("kind"):
            case "facts":
                recording.facts = record
            case "UpdateRecord":
                pairs = record["computed_by"].items()
                record["computed_by"] = {int(shard): worker for shard, worker in pairs}
                recording.updates.append(UpdateRecord(**record))
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
            except ValueError:  # torn: its writer was killed
                continue
