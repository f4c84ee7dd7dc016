"""A wire that a selector looks at: for what comes, and for room while something waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector

from quorate.transports.processes.wire import Message, Wire


class WatchedWire:
    """The coordinator's end of a worker's wire.

    Args:
        wire: this object closes it.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._selector: BaseSelector | None = None
        self._awaits_room = False  # whether the selector looks for it

    def watch(self, selector: BaseSelector, hear: Callable[[], None]) -> None:
        """Have a selector tell when something came, or there is room for what waits."""
        self._selector, self._awaits_room = selector, False
        selector.register(self.wire.socket, EVENT_READ, hear)
        self.flush()

    def deaf(self) -> None:
        """Look at it no more: it is cut, or somebody else's."""
        selector, self._selector = self._selector, None
        if selector is not None:
            with suppress(KeyError):
                selector.unregister(self.wire.socket)

    def post(self, message: Message, *fds: int) -> None:
        """Send a message, now or when the other end takes it. Does not block."""
        self.wire.post(message, fds)
        self._look()

    def flush(self) -> None:
        """Send what waits, as far as the other end takes it. Does not block."""
        self.wire.flush()
        self._look()

    def close(self) -> None:
        """Close this end."""
        self.deaf()
        self.wire.close()

    def _look(self) -> None:
        # With every message: the selector itself is asked only if something is to change.
        awaits_room = self.wire.has_unsent
        if self._selector is None or awaits_room == self._awaits_room:
            return
        self._awaits_room = awaits_room
        events = EVENT_READ | (EVENT_WRITE if awaits_room else 0)
        self._selector.modify(
            self.wire.socket, events, self._selector.get_key(self.wire.socket).data
        )
