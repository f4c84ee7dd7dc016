"""Turns on the generators that a process shares."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np

from quorate.replica.turns import Turns


def test_turns_notice_code_that_draws_and_seed_it() -> None:
    turns = Turns()
    random.seed(0)
    np.random.seed(0)
    expected = random.random(), np.random.rand()
    random.seed(0)
    np.random.seed(0)

    def work(reseed: Callable[[int], None]) -> tuple[float, float]:
        reseed(42)
        return random.random(), np.random.rand()

    assert turns.run(lambda reseed: 1) == 1
    assert not turns.draws
    first = turns.run(work)
    assert turns.draws
    assert turns.run(work) == first
    assert (random.random(), np.random.rand()) == expected  # as if nothing had been drawn


def test_turns_side_by_side_never_overlap_once_code_draws() -> None:
    turns = Turns(side_by_side=True)

    def work(reseed: Callable[[int], None]) -> list[float]:
        reseed(threading.get_ident() % 3)
        return [random.random() for _ in range(2000)]

    turns.run(work)
    results: dict[int, set[tuple[float, ...]]] = {0: set(), 1: set(), 2: set()}

    def run() -> None:
        for _ in range(10):
            results[threading.get_ident() % 3].add(tuple(turns.run(work)))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(found) <= 1 for found in results.values())
