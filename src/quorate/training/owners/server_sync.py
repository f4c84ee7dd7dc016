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
from quorate.training.owners.saves import Saves
from quorate.training.owners.server_owners import ServedOwners, ServerOwners
from quorate.training.owners.spread_optimizer import SpreadOptimizer
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
        assert isinstance(state.optimizer, SpreadOptimizer)
        self._state, self._optimizer = state, state.optimizer
        self._owners = ServerOwners(state.parameters, servers, state.average)
        state.saves = Saves(self._owners, [state.optimizer], say)
        state.model_edits.watch_values(partial(share.values, state))

    def updated(self) -> None:
        """Note an update: its parameters are fetched before user code runs."""
        self._state.model_edits.updated(self._owners.fetch_parameters)

    def end(self) -> None:
        """Send user code's changes to the servers; the whole state at the first call. Blocks."""
        if self._state.owners is not self._owners or self._optimizer.is_lent:
            self._optimizer.send(self._owners)
            self._state.owners = self._owners
        elif self._state.model_edits.have_values_changed():
            self._owners.send_parameters()
        else:
            self._owners.show_parameters()

    def close(self) -> None:
        """Fetch everything: servers end with their loop."""
        state = self._state
        state.saves = None
        try:
            self._owners.fetch_parameters()
            self._optimizer.leave_owners()
        except ServerError:
            state.update.is_half_made = True  # a part of the state is lost
            self._optimizer.is_away = False
        state.owners = ServedOwners(state.parameters)
