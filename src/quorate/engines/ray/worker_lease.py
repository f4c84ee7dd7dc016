"""A lease: an actor that holds the resources of a worker, wherever Ray has placed the actor.

Ray counts, preempts and kills actors; the worker's process belongs to the coordinator or to a relay
on the same node, and ends with the actor. The actor imports no torch.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import ray

from quorate.machine import this_host
from quorate.machine.environment import child_environment

PLACE, LIFE = "place", "life"  # threads of a lease


class WorkerLease:
    """The lease of one worker. Ray calls each method in a thread of its own.

    Ray makes the actor in the main thread, where signals are handled.

    Args:
        number: of the worker.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._leaves = threading.Event()
        signal.signal(signal.SIGTERM, self._leave)  # Ray's own handler ends the process at once

    def _leave(self, *_: object) -> None:
        """Note that this actor has to end; a second time, end."""
        if self._leaves.is_set():
            os._exit(1)
        self._leaves.set()

    def __repr__(self) -> str:
        """Return the text that Ray writes before each printed line."""
        return f"quorate worker {self._number}"

    def place(self) -> dict[str, Any]:
        """Return where Ray has placed the actor, and the environment for the worker's process.

        Ray names the devices of the worker in the environment.
        """
        node = ray.get_runtime_context().get_node_id()
        facts = {"host": this_host.name(), "mark": this_host.mark(), "node": node}
        return {**facts, "environment": child_environment({})}

    def live(self) -> None:
        """Block until the actor has to end: a waiting caller hears of a sudden end too."""
        self._leaves.wait()
