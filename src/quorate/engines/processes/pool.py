"""A site: where worker processes are started; and a hand: what the coordinator has of each.

On this machine they map the coordinator's memory, and each has a wire. Elsewhere somebody passes on
what goes through both: ``engines/ray``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from selectors import BaseSelector
from typing import Protocol

from quorate.engines.amendments import Amendments
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.wire import Message
from quorate.engines.servers import Servers


class WorkerHandle(ABC):
    """The coordinator's end of one worker's process, from its start to its exit.

    Args:
        number: of the worker.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.agreed: set[str] = set()  # what is known to be the coordinator's: see Agreement
        self.host: str | None = None  # that it is on, where there are several
        self.is_elsewhere = False  # on another host, or in another container
        self.is_placed = True  # else it says so when a machine has room for it
        self.place = ""  # where it is, if results of workers there are added there: see ``Joined``
        self._amended = 0  # the number of the newest ``Amendments`` that it has
        self._shared = self._stored = 0  # those of the newest ``Values`` that it has

    def post_with(self, amendments: Amendments, message: Message, *fds: int) -> None:
        """Send it a message, and with it what user code changed, if it has not been told."""
        if amendments.number != self._amended:
            self._amended = amendments.number
            message = {**message, "amendments": amendments.to_json()}
        if (shared := amendments.shared).number != self._shared:
            segment = shared.tensors.segment if shared.stored != self._stored else None
            self._shared, self._stored = shared.number, shared.stored
            message = {**message, "shared": shared.to_json(stored=segment is not None)}
            if segment is not None:
                fds = (segment.fd, *fds)
        self.post(message, *fds)

    def withdraw(self, **named: object) -> bool:
        """Take back a message that waits, which has these fields; return whether."""
        self._amended = self._shared = self._stored = -1  # perhaps it was to be told with that
        return self._withdraw(**named)

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The number of its process; None as long as there is none, or it has none here."""

    @property
    @abstractmethod
    def tells_exit(self) -> bool:
        """Whether ``look`` is called when it has ended, without asking for it."""

    @property
    @abstractmethod
    def is_cut(self) -> bool:
        """Whether nothing more will come from it."""

    @abstractmethod
    def watch(
        self, selector: BaseSelector, hear: Callable[[], None], look: Callable[[], None]
    ) -> None:
        """Have a selector tell when it was heard from, or takes what waits, and when it ended."""

    @abstractmethod
    def deaf(self) -> None:
        """Listen to it no more."""

    @abstractmethod
    def post(self, message: Message, *fds: int) -> None:
        """Send it a message, now or when it takes it. Does not block: it may be stopped."""

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """Tell it of a ticket that the arena has as cancelled, if it does not see the arena."""

    @abstractmethod
    def flush(self) -> None:
        """Send what waits, as far as it takes it. Does not block."""

    @abstractmethod
    def arrived(self) -> list[Message]:
        """Return all messages that are here. Does not block."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether it is gone. Does not block."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Return whether it ends in time. Blocks."""

    @abstractmethod
    def kill(self) -> None:
        """End it as signal 9 does. Does not block; what it does until then is done."""

    @abstractmethod
    def ending(self) -> Ending:
        """Return how it ended. It must have ended."""

    @abstractmethod
    def close(self) -> None:
        """Kill it if it lives, wait for its exit, and close what belonged to it."""

    @abstractmethod
    def _withdraw(self, **named: object) -> bool: ...


class WorkerPool(Protocol):
    """Where workers' processes are started."""

    takes_runs: bool  # whether ``Compute`` may have several shards

    @property
    def servers(self) -> Servers | None:
        """What has the parameters; None: the coordinator has."""

    def start(self, number: int) -> WorkerHandle:
        """Start a worker's process. It need not be there yet.

        Raises:
            OSError: it cannot be started.
        """

    def flush(self) -> None:
        """Pass on what was asked for and could not be passed on yet. Does not block.

        Raises:
            ServerError: a server is gone.
        """

    def close(self) -> None:
        """Free what belongs to no single process. All of them have ended."""
