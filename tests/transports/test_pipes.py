"""Pipes among the ranks of a host, each a thread here: the pipes are real ones, under /proc."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from quorate.transports.collective.pipes import Gather, Pipes, pipes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they are opened under /proc")

T = TypeVar("T")
LIMIT_S = 60.0
LONG = 300_000  # bytes: a pipe has room for 65,536


class Told:
    """What ranks tell each other before they have pipes."""

    def __init__(self, count: int) -> None:
        self._texts = [b""] * count
        self._barrier = threading.Barrier(count)

    def gather(self, rank: int, own: bytes) -> list[bytes]:
        self._texts[rank] = own
        self._barrier.wait(LIMIT_S)
        found = [*self._texts]
        self._barrier.wait(LIMIT_S)
        return found


def on_ranks(
    hosts: Sequence[Sequence[int]],
    work: Callable[[Pipes | None, bool, int], T],
    *,
    limit_s: float = LIMIT_S,
    look: Callable[[], None] = lambda: None,
    forges: Callable[[bytes], bytes] = lambda offer: offer,
) -> list[T]:
    """Return what each rank comes to, which closes its pipes then."""
    count = sum(map(len, hosts))
    told = Told(count)

    def rank(number: int) -> T:
        gather: Gather = lambda own: told.gather(number, forges(own))  # noqa: E731
        own, have_all = pipes(hosts, number, gather, limit_s, look)
        try:
            return work(own, have_all, number)
        finally:
            if own is not None:
                own.close()

    with ThreadPoolExecutor(count) as pool:
        return [each.result(LIMIT_S) for each in [pool.submit(rank, n) for n in range(count)]]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_what_is_gathered_and_spread_is_everywhere(count: int) -> None:
    texts = [bytes([65 + rank]) * (LONG if rank % 2 else rank) for rank in range(count)]
    word = b"next" * LONG
    reached: list[int] = []

    def work(own: Pipes | None, have_all: bool, rank: int) -> list[object]:
        assert own is not None
        assert have_all
        found: list[object] = []
        for _ in range(3):
            found.append(own.gather(texts[rank]))
            found.append(own.spread(word if rank == 0 else None))
            reached.append(rank)
            own.arrive()
            found.append(len(reached))
            own.arrive()
        return found

    for found in on_ranks([range(count)], work):
        assert found[0::3] == [texts] * 3
        assert found[1::3] == [word] * 3
        assert found[2::3] == [count, 2 * count, 3 * count]


def test_each_host_has_its_own_and_a_rank_that_is_alone_has_none() -> None:
    def work(own: Pipes | None, have_all: bool, rank: int) -> list[bytes] | None:
        assert have_all
        return None if own is None else own.gather(str(rank).encode())

    assert on_ranks([[0, 3], [1], [2, 4]], work) == [
        *([b"0", b"3"], None, [b"2", b"4"], [b"0", b"3"], [b"2", b"4"])
    ]


def test_whoever_waits_for_a_rank_that_is_gone_raises() -> None:
    def work(own: Pipes | None, _have_all: bool, rank: int) -> bool:
        assert own is not None
        if rank == 1:
            return True  # it leaves
        with pytest.raises(ConnectionError):
            own.arrive()
        return True

    assert on_ranks([[0, 1]], work) == [True, True]


def test_nobody_waits_in_vain_or_for_too_long() -> None:
    left = threading.Event()

    def lost() -> None:
        raise LookupError("a rank is lost")

    def late(own: Pipes | None, _have_all: bool, rank: int) -> str:
        assert own is not None
        if rank == 1:
            assert left.wait(LIMIT_S)
            return ""
        try:
            own.gather(b"")
        except (RuntimeError, LookupError) as error:
            return str(error)
        finally:
            left.set()
        return "it came"

    assert on_ranks([[0, 1]], late, limit_s=0.05)[0] == "nothing came in 0.05 s"
    left.clear()
    assert on_ranks([[0, 1]], late, look=lost)[0] == "a rank is lost"


def test_no_pipe_of_a_stranger_is_read() -> None:
    stranger, write = os.pipe()
    os.write(write, b"his")

    def forged(text: bytes) -> bytes:
        offer = json.loads(text)
        if isinstance(offer, list):  # the process has it, and it is another one
            offer[1] = {distance: [stranger, *which] for distance, (_, *which) in offer[1].items()}
        return json.dumps(offer).encode()

    def work(own: Pipes | None, have_all: bool, _rank: int) -> bool:
        return own is None and not have_all

    try:
        assert on_ranks([[0, 1]], work, forges=forged) == [True, True]
        assert os.read(stranger, 3) == b"his"
    finally:
        os.close(stranger)
        os.close(write)
