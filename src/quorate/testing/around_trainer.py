"""Context managers around a trainer: workers in memory, and the check of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quorate.coordination.protocol import Effect, Event
from quorate.engines import Channel, Transport, WrappedTransport
from quorate.engines.job import Job, Training
from quorate.engines.local.towers import Towers
from quorate.errors import SettingError
from quorate.testing.contract import check_engine
from quorate.testing.workers_in_memory import InMemory, Move, one_second
from quorate.training.observer import observing
from quorate.training.state import State


@contextmanager
def in_memory(
    script: Iterable[Move] = (),
    *,
    time_s: Callable[[int, int, int], float] = one_second,
    skips: bool = False,
) -> Iterator[list[Event | Effect]]:
    """Give the loops of a trainer workers in memory within the block, one per tower.

    Args:
        script: moves of the workers in the first loop. Later loops have no script.
        time_s: duration of a shard; see ``InMemory``.
        skips: whether impossible moves are skipped; see ``InMemory``.

    Yields:
        A list of everything so far: events, and effects that the coordinator sent, in order.

    Raises:
        SettingError: the trainer has no towers; use ``Workers(engine="towers")``.
    """
    moves = list(script)
    happened: list[Event | Effect] = []

    def replace(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
        if not isinstance(transport, Towers):
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
    """Check the engine of each training loop within the block, before the first update.

    Args:
        options: keyword arguments for ``check_engine``.

    Yields:
        A list of the clauses of the contract that were checked so far.
    """
    checked: list[str] = []

    def check(transport: Transport, _state: State, _facts: Mapping[str, Any]) -> Transport:
        return _Checked(transport, checked, options)

    with observing(check):
        yield checked


class _Checked(WrappedTransport):
    """A ``Transport`` with a check at the beginning of the training."""

    def __init__(self, inner: Transport, checked: list[str], options: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self._checked = checked
        self._options = options

    def open(self, job: Job) -> Channel:
        if isinstance(job, Training):
            self._checked += check_engine(self._inner, job, **self._options)
        return super().open(job)
