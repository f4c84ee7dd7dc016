"""Contents of calls between the coordinator and a node: messages, and images of memory as bytes.

A call has a message and images; so has each piece of news. Ray itself pickles the frame of a call.
Requests to a worker and answers are those of ``worker_messages``; a relay has messages of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from quorate.engines.messages import MessageReader
from quorate.engines.processes.arena import ArenaPart
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.script import Script
from quorate.engines.processes.worker_messages import WorkerMessage
from quorate.engines.worker_status import Doing

_PACKAGE = Path(__file__).parents[2]


Ref = Any  # ray.ObjectRef of an image


Part = tuple[ArenaPart, int | None]  # with the slot, if the part is in one


class StartProcess(msgspec.Struct, tag=True):
    """Start a worker's process in an environment."""

    number: int  # of the worker
    environment: dict[str, str]


class KillProcess(msgspec.Struct, tag=True):
    """Kill a worker's process."""


Ordered = StartProcess | KillProcess | WorkerMessage


class RelayOrder(msgspec.Struct):
    """An order to a relay on behalf of a worker, or a message to the worker."""

    message: Ordered
    parts: list[Part]  # of the images of the call


class NodeFacts(msgspec.Struct, tag=True):
    """The first news of a relay: facts to compare, see ``same_everywhere``."""

    same: dict[str, str]


class WireCut(msgspec.Struct, tag=True):
    """The worker's wire is cut."""


class WorkerEnded(msgspec.Struct, tag=True):
    """The worker's process has ended."""

    ending: Ending


Reported = WireCut | WorkerEnded | WorkerMessage


class RelayNews(msgspec.Struct):
    """News of a relay, with the status of the worker, and perhaps with an image."""

    life: int | None  # names the worker's process
    message: NodeFacts | Reported | None
    doing: Doing | None = None  # ``since`` is an age: clocks of two hosts have nothing in common
    ahead: tuple[int, int] | None = None
    image: Part | None = None  # of the coordinator's arena


ORDER_READER: MessageReader[RelayOrder] = MessageReader(RelayOrder)
NEWS_READER: MessageReader[RelayNews] = MessageReader(RelayNews)


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
