"""Observers: whoever wants to look at a training loop, or to reach its workers in another way.

The loop knows none of them. A command, a test or a tool sets one around the script that it runs,
and the loop asks for it when it has a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from quorate.errors import SettingError

if TYPE_CHECKING:
    from quorate.engines import Transport
    from quorate.training.state import State

    # From a loop's transport, its state and its facts (what a checkpoint says of the run, and its
    # pipeline) to the
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


def refuse_ranks() -> None:
    """Refuse a collective where there are observers: its ranks have no transport to look at.

    Raises:
        SettingError: there are some.
    """
    if _observers.get():
        expected = "processes or towers here: ranks exchange gradients past whoever looks at a loop"
        fix = "take engine='processes', which has the same bits"
        raise SettingError("engine", "collective", expected, fix)


def observed(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
    """Return the transport as the observers want it: the last one set is the outermost."""
    for observe in _observers.get():
        transport = observe(transport, state, facts)
    return transport
