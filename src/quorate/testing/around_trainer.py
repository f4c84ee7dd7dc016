"""Trainers under test: their loops get workers in memory, or have their transport checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quorate.coordination.protocol import Effect, Event
from quorate.errors import SettingError
from quorate.testing.contract import check_transport
from quorate.testing.moves import Move
from quorate.testing.transport import InMemory, one_second
from quorate.training.observer import observing
from quorate.training.state import State
from quorate.transports import Channel, Transport
from quorate.transports.inline import Inline
from quorate.transports.job import Job, Training
from quorate.transports.towers import Towers
from quorate.transports.wrapped import WrappedTransport


@contextmanager
def in_memory(
    script: Iterable[Move] = (),
    *,
    time_s: Callable[[int, int, int], float] = one_second,
    skips: bool = False,
) -> Iterator[list[Event | Effect]]:
    """Within the block a trainer's loops have workers in memory, as many as its towers.

    Args:
        script: moves of the first loop's workers. The loops after it have none.
        time_s: see ``InMemory``.
        skips: see ``InMemory``.

    Yields:
        What happened so far: events, and what the coordinator sent, in order.

    Raises:
        SettingError: the trainer has no towers; give it ``engine="towers"``.
    """
    moves = list(script)
    happened: list[Event | Effect] = []

    def replace(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
        if not isinstance(transport, Towers | Inline):
            transport.close()
            raise SettingError(
                "engine", facts["engine"], "towers", "workers in memory take the place of towers"
            )
        workers = InMemory(
            transport.replicas,
            state.buffers,
            moves,
            threads=transport.threads,
            time_s=time_s,
            skips=skips,
        )
        moves.clear()
        workers.happened = happened
        transport.close()
        return workers

    with observing(replace):
        yield happened


@contextmanager
def checking_transport(**options: Any) -> Iterator[list[str]]:
    """Within the block the transport of each training loop is checked before its first update.

    Args:
        options: see ``check_transport``.

    Yields:
        The clauses of the contract that were checked so far.
    """
    checked: list[str] = []

    def check(transport: Transport, _state: State, _facts: Mapping[str, Any]) -> Transport:
        return _Checked(transport, checked, options)

    with observing(check):
        yield checked


class _Checked(WrappedTransport):
    """A ``Transport`` that is checked when the training begins."""

    def __init__(self, inner: Transport, checked: list[str], options: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self._checked = checked
        self._options = options

    def open(self, job: Job) -> Channel:
        if isinstance(job, Training):
            self._checked += check_transport(self._inner, job, **self._options)
        return super().open(job)
