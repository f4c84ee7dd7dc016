"""Turns on what a process has once: generators, and switches."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quorate.replica.shared import generators, switches
from quorate.replica.turns import Turns

Reseed = Callable[[int], None]


def in_threads(count: int, run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    states, stand = generators.states(), switches.settings()
    yield
    generators.restore(states)
    switches.restore(stand)


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

    def run(_n: int) -> None:
        for _ in range(10):
            results[threading.get_ident() % 3].add(tuple(turns.run(work)))

    in_threads(6, run)
    assert all(len(found) <= 1 for found in results.values())


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "random's bits": lambda: random.getrandbits(3),
    "a whole state of random's": lambda: [random.random() for _ in range(312)],
    "gauss": lambda: random.gauss(0, 1),
    "choice": lambda: random.choice([1, 2]),
    "rand": np.random.rand,
    "randn": np.random.randn,
    "a whole state of NumPy's": lambda: np.random.randint(0, 2**32, 624, dtype=np.uint32),
    "torch, by name": lambda: torch.rand((), generator=torch.default_generator).item(),
    "a thread of a pool": lambda: in_threads(1, lambda _: torch.rand(())),  # type: ignore[arg-type,return-value]
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_leaves_a_mark(name: str) -> None:
    for _ in range(3):
        states, before = generators.states(), generators.mark()
        assert generators.mark() == before
        DRAWS[name]()
        assert generators.mark() != before
        generators.restore(states)
        assert generators.mark() == before
        DRAWS[name]()


def test_the_second_half_of_a_pair_leaves_a_mark() -> None:
    np.random.randn()
    random.gauss(0, 1)
    for draw in (np.random.randn, lambda: random.gauss(0, 1)):
        before = generators.mark()
        draw()
        assert generators.mark() != before


def test_a_generator_that_a_script_put_in_its_place_leaves_marks() -> None:
    kept: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.MT19937(3))  # type: ignore[attr-defined]
    try:
        before = generators.mark()
        np.random.rand()
        assert generators.mark() != before
    finally:
        np.random.set_bit_generator(kept)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["random", "numpy", "torch"])
def test_a_draw_that_comes_late_is_keyed_whoever_runs_beside(kind: str) -> None:
    """One run of 40 draws, in the midst of the others, on four threads."""
    draw = {
        "random": random.random,
        "numpy": np.random.rand,
        "torch": lambda: torch.rand((), generator=torch.default_generator).item(),
    }[kind]

    def shard(number: int, reseed: Reseed) -> float | None:
        reseed(number)
        first = draw() if number % 40 == 17 else None
        time.sleep(0.0005)  # another thread's turn
        return first if first is None else first + draw()

    alone = Turns(side_by_side=True)
    alone.require("a test")
    expected = [alone.run(lambda reseed, n=n: shard(n, reseed)) for n in range(160)]
    for _ in range(3):
        turns = Turns(side_by_side=True)
        found: dict[int, float | None] = {}

        def run(thread: int, turns: Turns = turns, found: Any = found) -> None:
            for n in range(thread, 160, 4):
                found[n] = turns.run(lambda reseed, n=n: shard(n, reseed))  # type: ignore[misc]

        in_threads(4, run)
        assert turns.draws
        assert [found[n] for n in range(160)] == expected


def test_others_that_draw_in_turns_hide_nothing() -> None:
    """Rows are loaded in turns, with draws, all the while; shards draw late."""
    rows, ends = Turns(), threading.Event()
    wrong = []

    def load(reseed: Reseed) -> list[float]:
        reseed(5)
        return [random.random() for _ in range(100)]

    expected = rows.run(load)

    def loading(_n: int) -> None:
        while not ends.is_set():
            if rows.run(load) != expected:
                wrong.append(1)

    def shard(number: int, reseed: Reseed) -> float:
        reseed(number)
        time.sleep(0.0002)
        return random.random() if number > 20 else 0.0

    turns = Turns(side_by_side=True)
    turns.may_draw = "random.random (train.py:3)"
    loader = threading.Thread(target=loading, args=(0,))
    loader.start()
    found = [turns.run(lambda reseed, n=n: shard(n, reseed)) for n in range(40)]
    ends.set()
    loader.join()
    news = turns.news() or ""
    assert news.startswith("workers compute one at a time, because random.random (train.py:3)")
    assert found[21:] == [random.Random(n).random() for n in range(21, 40)]
    assert not wrong


def test_draws_elsewhere_are_no_draws_of_this_code() -> None:
    turns = Turns(side_by_side=True)
    turns.run(lambda _: 1)

    def work(_reseed: Reseed) -> int:
        return next(calls)

    calls = iter(range(9))
    assert turns.run(work) == 0
    entered, drawn = threading.Event(), threading.Event()

    def slow(_reseed: Reseed) -> int:
        entered.set()
        drawn.wait(60)
        return next(calls)

    def elsewhere(_n: int) -> None:
        entered.wait(60)
        random.random()
        drawn.set()

    thread = threading.Thread(target=elsewhere, args=(0,))
    thread.start()
    assert turns.run(slow) == 2  # once more, alone
    thread.join()
    assert not turns.draws
    assert turns.news() is None


def test_a_switch_that_is_left_is_put_back_and_said() -> None:
    turns = Turns(side_by_side=True)

    def work(_reseed: Reseed) -> torch.Tensor:
        value = torch.ones(())
        torch.set_default_dtype(torch.float64)
        return value

    turns.run(lambda _: 1)
    for _ in range(3):
        assert turns.run(work).dtype is torch.float32
        assert torch.get_default_dtype() is torch.float32
    news = turns.news() or ""
    assert news.startswith("workers compute one at a time, because a shard changes the default dty")
    assert turns.news() is None  # said


def test_modes_of_the_thread_are_put_back() -> None:
    threads = torch.get_num_threads()
    with switches.of_a_shard(named=False, scripted=False):
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads + 1)
        torch.set_autocast_enabled("cpu", True)
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", switches.SWITCHES)
def test_every_switch_is_read_and_put_back(name: str) -> None:
    read, set_ = switches.SWITCHES[name]
    before = switches.settings()
    other: dict[Any, Any] = {torch.float32: torch.float64, "highest": "high", 0: 1}
    value = read()
    set_(not value if isinstance(value, bool) else other[value])
    assert switches.changed(before, switches.settings()) == [name]
    switches.restore(before)
    assert switches.settings() == before
