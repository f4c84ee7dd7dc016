"""Observers: code that looks at a training loop, or replaces the transport to its workers.

The loop knows no observer by name. A command, a test or a tool sets an observer around the script,
and the loop calls the observer with the new transport.
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

    # From a loop's transport, state and facts (as saved in a checkpoint, and the pipeline) to the
    # transport for the loop: the same, a wrapper, or another. The loop closes the result.
    Observe = Callable[[Transport, State, Mapping[str, Any]], Transport]

_observers: ContextVar[tuple[Observe, ...]] = ContextVar("quorate_observers", default=())


@contextmanager
def observing(observe: Observe) -> Iterator[None]:
    """Observe every training loop of this thread inside the block."""
    token = _observers.set((*_observers.get(), observe))
    try:
        yield
    finally:
        _observers.reset(token)


def refuse_ranks() -> None:
    """Refuse a collective if there are observers: ranks have no transport to observe.

    Raises:
        SettingError: there are observers.
    """
    if _observers.get():
        expected = "processes or towers here: ranks exchange gradients past whoever looks at a loop"
        fix = "take engine='processes', which has the same bits"
        raise SettingError("engine", "collective", expected, fix)


def observed(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
    """Return a transport after all observers; the observer set last is the outermost."""
    for observe in _observers.get():
        transport = observe(transport, state, facts)
    return transport
