"""Contents of calls between the coordinator and a node: messages, and images of memory as bytes.

A call has a message and images; so has each piece of news. Ray itself pickles the frame of a call.
Requests to a worker and answers are those of ``worker_messages``; an actor adds news of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from quorate.engines.messages import MessageReader
from quorate.engines.processes.arena import Arena, Image
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.script import Script
from quorate.engines.processes.worker_messages import ShareMemory, WorkerMessage
from quorate.engines.worker_status import Doing

RESULTS = 2  # slots of a node's arena: one is written while the other's result is passed on

_PACKAGE = Path(__file__).parents[2]


Ref = Any  # ray.ObjectRef of an image


class ArenaPart(StrEnum):
    """The part of an arena with the bytes of an image."""

    PARAMETERS = "parameters"
    SLICES = "slices"  # of the parameters: an image per server
    AVERAGE = "average"
    FROZEN = "frozen"
    BUFFERS = "buffers"
    SNAPSHOT = "snapshot"  # a slot with parameters and buffers
    RESULT = "result"  # a slot with the result of a shard
    REST = "rest"  # of such a slot, where the gradient goes to servers
    SHARED = "shared"  # tensors of ``Shared``; in no arena
    START = "start"  # parameters and buffers that workers are compared from; in no arena


class ActorStart(msgspec.Struct):
    """The argument of ``WorkerActor.serve``."""

    script: Script
    folder: str | None  # that travelled with the script
    threads: int  # of the worker, intra-op
    node: str  # of the coordinator
    mark: str  # of the coordinator's host
    door: str | None  # the name of the coordinator's ``HandoverSocket``
    key: str  # of the worker, at the door


class ActorHello(msgspec.Struct, tag=True):
    """The actor runs, on this node."""

    same: dict[str, str]  # facts to compare, see ``same_everywhere``
    host: str
    mark: str
    node: str


class ActorStarted(msgspec.Struct, tag=True):
    """The actor has started the worker."""

    pid: int | None
    near: bool  # whether the worker was handed over to the coordinator


class ActorLeaves(msgspec.Struct, tag=True):
    """The actor has to end."""


class WorkerCut(msgspec.Struct, tag=True):
    """The worker's wire is cut."""


class WorkerEnded(msgspec.Struct, tag=True):
    """The worker has ended; the last news."""

    ending: Ending


ActorMessage = ActorHello | ActorStarted | ActorLeaves | WorkerCut | WorkerMessage


class News(msgspec.Struct):
    """News of an actor, with the status of the worker."""

    message: ActorMessage | WorkerEnded | None  # None: a sign of life
    has_image: bool  # whether an image follows
    doing: Doing | None = None  # ``since`` is an age: clocks of two hosts have nothing in common
    ahead: tuple[int, int] | None = None


START_READER: MessageReader[ActorStart] = MessageReader(ActorStart)
NEWS_READER: MessageReader[News] = MessageReader(News)


def arena_like(sent: ShareMemory) -> Arena:
    """Return an arena for one worker alone, with room for images of the coordinator's arena."""
    description = sent.description
    snapshots = min(1, description.sizes.snapshots)
    own = description.sizes._replace(slots=RESULTS + snapshots, snapshots=snapshots, again=False)
    return Arena.like(description._replace(sizes=own))


def image_of(arena: Arena, part: str, slot: int | None = None) -> Image:
    """Return the bytes of a part of an arena, without a copy.

    Args:
        slot: the number of the slot, if the part is in one.
    """
    if slot is not None:
        return arena.rest_image(slot) if part == ArenaPart.REST else arena.slot_image(slot)
    if part == ArenaPart.BUFFERS:
        return arena.buffers_image()
    flat = {
        ArenaPart.PARAMETERS: arena.parameters,
        ArenaPart.AVERAGE: arena.average,
        ArenaPart.FROZEN: arena.frozen,
    }[ArenaPart(part)]
    assert flat is not None
    assert flat.segment is not None
    return flat.segment.array(flat.segment.nbytes)


def same_everywhere(script: Script, copy: Script | None = None) -> dict[str, str]:
    """Return the facts about a node that are the same on every node, by their names.

    Args:
        script: as on the host where the run was started.
        copy: as on this host, if the script is elsewhere here.
    """
    here = copy or script
    return {
        **same_packages(),
        f"the script {script.path}": _hash([Path(here.path)]),
        f"the folder {script.folder}": "is there" if Path(here.folder).is_dir() else "not there",
    }


def same_packages() -> dict[str, str]:
    """Return the versions of packages that are the same on every node, by their names."""
    return {"the torch build": torch.__version__, "quorate": _package_hash()}


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Return the first differing fact of a node: name, got, expected; None: all are the same."""
    for name, expected in here.items():
        if (got := there.get(name)) != expected:
            return f"{name}: got {got}, expected {expected} as where the run was started"
    return None


@cache
def _package_hash() -> str:
    return _hash(sorted(_PACKAGE.rglob("*.py")))


def _hash(files: list[Path]) -> str:
    """Return a short hash of the text of files, in their order."""
    found = hashlib.sha256()
    for file in files:
        if not file.exists():
            return "not there"
        if file.is_file():  # a folder is a program too
            found.update(file.read_bytes())
    return found.hexdigest()[:12]
