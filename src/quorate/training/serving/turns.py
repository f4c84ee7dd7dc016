"""Turns: user code runs between two updates on a state held by servers.

Before user code runs, the state is fetched; afterwards, changes of user code are sent to the
servers, before the next shard is dealt.
"""

from __future__ import annotations

from quorate.engines import Transport
from quorate.engines.processes.transport import servers_of
from quorate.engines.servers import Servers
from quorate.errors import ServerError
from quorate.training.collective import share
from quorate.training.serving.served_optimizer import ServedOptimizer
from quorate.training.state import State


def turns_of(state: State, workers: Transport) -> Turns | None:
    """Return the turns of user code in a loop with the given workers; None without servers."""
    servers = servers_of(workers)
    return None if servers is None else Turns(state, servers)


class Turns:
    """The turns of user code in a loop. ``close`` before the servers end.

    Args:
        state: the state; all of it is in this process.
        servers: servers that receive the state at the first ``end``.
    """

    def __init__(self, state: State, servers: Servers) -> None:
        assert isinstance(state.optimizer, ServedOptimizer)
        self._state, self._optimizer = state, state.optimizer
        self._servers = servers
        self._mark: list[bytes] = []

    def updated(self) -> None:
        """Note an update: its parameters are fetched when user code visits the state."""
        self._state.visits.updated(self._begin)

    def _begin(self) -> None:
        self._optimizer.fetch_parameters()
        self._mark = share.mark(self._state)

    def end(self) -> None:
        """Send user code's changes to the servers; the whole state at the first call. Blocks."""
        if not self._optimizer.is_on or self._optimizer.is_lent:
            self._optimizer.begin(self._servers, self._state.average)
        elif self._state.visits.has_come and share.mark(self._state) != self._mark:
            self._optimizer.set()
        else:
            self._optimizer.show()

    def close(self) -> None:
        """Fetch everything: servers end with their loop."""
        try:
            self._optimizer.end()
        except ServerError:
            self._state.update.under_way = True  # a part of the state is lost
