"""Server sync: user code runs between two updates on a state held by servers.

Before user code runs, the state is fetched; afterwards, changes of user code are sent to the
servers, before the next shard is dealt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from quorate.engines.servers import Servers
from quorate.errors import ServerError
from quorate.training.collective import share
from quorate.training.owners.saves import Saves
from quorate.training.owners.server_owners import ServerOwners, ServerStandIn
from quorate.training.state import State


@contextmanager
def let_servers_own(state: State, servers: Servers, say: Callable[[str], None]) -> Iterator[None]:
    """Let servers own a state inside the block; the servers end after the block.

    Args:
        state: the state; all of it is in this process.
        servers: servers that receive the state at the first ``send_user_changes``.
        say: shows a line to the user.
    """
    (optimizer,) = state.phases.spread
    owners = ServerOwners(state.parameters, servers, state.average, optimizer)
    state.owners, state.saves = owners, Saves(owners, [optimizer], say)
    state.model_edits.watch_values(partial(share.values, state))
    try:
        yield
    finally:
        state.saves = None
        try:
            owners.fetch_parameters()
            optimizer.leave_owners()
        except ServerError:
            state.update.is_half_made = True  # a part of the state is lost
            optimizer.owners = None
        state.owners = ServerStandIn(state.parameters)
