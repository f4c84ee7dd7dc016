"""Server sync: user code runs between two updates on a state held by servers.

Before user code runs, the state is fetched; afterwards, changes of user code are sent to the
servers, before the next shard is dealt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quorate.engines import Transport
from quorate.engines.processes.transport import servers_of
from quorate.engines.servers import Servers
from quorate.errors import ServerError
from quorate.training.collective import share
from quorate.training.owners.served_optimizer import ServedOptimizer
from quorate.training.owners.server_saves import ServerSaves
from quorate.training.state import State


def server_sync_of(
    state: State, workers: Transport, say: Callable[[str], None]
) -> ServerSync | None:
    """Return the sync of the state with the servers of a loop's workers; None without servers."""
    servers = servers_of(workers)
    return None if servers is None else ServerSync(state, servers, say)


class ServerSync:
    """Keeps the state of user code and of servers equal. ``close`` before the servers end.

    Args:
        state: the state; all of it is in this process.
        servers: servers that receive the state at the first ``end``.
        say: shows a line to the user.
    """

    def __init__(self, state: State, servers: Servers, say: Callable[[str], None]) -> None:
        assert isinstance(state.optimizer, ServedOptimizer)
        self._state, self._optimizer = state, state.optimizer
        self._servers = servers
        state.saves = ServerSaves(state.optimizer, servers, say)
        state.model_edits.watch_values(partial(share.values, state))

    def updated(self) -> None:
        """Note an update: its parameters are fetched before user code runs."""
        self._state.model_edits.updated(self._optimizer.fetch_parameters)

    def end(self) -> None:
        """Send user code's changes to the servers; the whole state at the first call. Blocks."""
        if not self._optimizer.is_on or self._optimizer.is_lent:
            self._optimizer.begin(self._servers, self._state.average)
        elif self._state.model_edits.have_values_changed():
            self._optimizer.set()
        else:
            self._optimizer.show()

    def close(self) -> None:
        """Fetch everything: servers end with their loop."""
        self._state.saves = None
        try:
            self._optimizer.end()
        except ServerError:
            self._state.update.is_half_made = True  # a part of the state is lost
