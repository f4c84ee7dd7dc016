"""Observers: whoever wants to look at a training loop, or to reach its workers in another way.

The loop knows none of them. A command, a test or a tool sets one around the script that it runs,
and the loop asks for it when it has a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorate.training.state import State
    from quorate.transports import Transport

    # From a loop's transport, its state and its facts (what a checkpoint says of the run) to the
    # transport that the loop is to use: the same, one around it, or another; which it closes.
    Observe = Callable[[Transport, State, Mapping[str, Any]], Transport]

_observers: ContextVar[tuple[Observe, ...]] = ContextVar("quorate_observers", default=())


@contextmanager
def observing(observe: Observe) -> Iterator[None]:
    """Within the block every training loop of this thread is observed."""
    token = _observers.set((*_observers.get(), observe))
    try:
        yield
    finally:
        _observers.reset(token)


def observed(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
    """Return the transport as the observers want it: the last one set is the outermost."""
    for observe in _observers.get():
        transport = observe(transport, state, facts)
    return transport
