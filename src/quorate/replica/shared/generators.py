"""Generators that a process has once: Python's, NumPy's legacy generator, and torch's default.

Draws are checked before and after every shard, so a check must cost next to nothing.
``random.getstate()`` takes 12 us and ``numpy.random.get_state()`` 37 us. So the position in a
generator's state, and a word of the state, are read from memory if a trial shows that this works.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from quorate.coordination.keys import Seed, made
from quorate.replica.quick import generator_memory

WORDS = 624  # of the state of a Mersenne Twister

Mark = tuple[Any, ...]

_halves: dict[Mark, int] = {}  # position of NumPy's generator -> whether half of a pair is left


class GeneratorStates(NamedTuple):
    """The states of all three generators."""

    python: Any
    numpy: dict[str, Any]
    torch: torch.Tensor


def states() -> GeneratorStates:
    """Return the states of the generators: 80 us."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return GeneratorStates(random.getstate(), state, torch.default_generator.get_state())


def restore(wanted: GeneratorStates) -> None:
    """Restore the states of the generators."""
    random.setstate(wanted.python)
    np.random.set_state(wanted.numpy)
    _halves.clear()
    torch.default_generator.set_state(wanted.torch)


@contextmanager
def kept() -> Iterator[None]:
    """Restore the states of the generators at the end of the block."""
    before = states()
    try:
        yield
    finally:
        restore(before)


def reseed(seed: Seed) -> None:
    """Restart all three generators from a 64-bit key."""
    seed = made(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


def mark() -> Mark:
    """Return a mark that changes with each draw from a generator: 1 us."""
    return _python(), _numpy(), _torch()


def shared_mark() -> Mark:
    """Return the same mark without torch's part, which comes last."""
    return _python(), _numpy()


def torch_mark() -> Hashable:
    """Return torch's part, which changes with draws of threads without a ``Stream``."""
    return _torch()


def _torch_by_state() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _torch_in_memory() -> Callable[[], Hashable]:
    """Return a reader of torch's position in memory; the slow way if this fails."""
    owner = torch.default_generator
    read = generator_memory.reader(owner)
    if read is None:
        return _torch_by_state

    def place() -> Hashable:
        # A script may have replaced the generator.
        found = read() if torch.default_generator is owner else None
        return _torch_by_state() if found is None else found

    return place


def _python_by_state() -> Mark:
    return (random.getstate(),)


def _numpy_by_state() -> Mark:
    state = states().numpy
    inner = state["state"]
    return inner["pos"], inner["key"].tobytes(), state["has_gauss"]


def _python_in_memory() -> Callable[[], Mark]:
    """Return a reader of index and a word of ``random``'s state; the slow way if this fails."""
    try:
        owner: Any = random.random.__self__  # type: ignore[attr-defined]
        # An object's header, then an int, then the words: as in CPython's _randommodule.c.
        at = object.__basicsize__
        if type(owner).__basicsize__ < at + 4 * (WORDS + 1):
            return _python_by_state
        memory = (ctypes.c_uint32 * (WORDS + 1)).from_address(id(owner) + at)
        version, state, _ = random.getstate()
        if version != 3 or memory[0] != state[-1] or [*memory[1:]] != [*state[:-1]]:
            return _python_by_state
    except (AttributeError, TypeError, ValueError):
        return _python_by_state
    return lambda: (memory[0], memory[1], owner.gauss_next)


def _numpy_in_memory() -> Callable[[], Mark]:
    """Return a reader of position and a word of NumPy's state; the slow way if this fails."""
    try:
        numpy_random: Any = np.random
        get = numpy_random.get_bit_generator
        owner = get()
        memory = (ctypes.c_uint32 * (WORDS + 1)).from_address(owner.ctypes.state_address)
        inner = states().numpy["state"]
        if memory[WORDS] != inner["pos"] or [*memory[:WORDS]] != inner["key"].tolist():
            return _numpy_by_state
    except (AttributeError, TypeError, ValueError):
        return _numpy_by_state

    def read() -> Mark:
        if get() is not owner:  # a script has replaced the generator
            return _numpy_by_state()
        place = (memory[WORDS], memory[0], memory[1])
        # The second number of a pair of normal numbers is returned without a draw: its presence
        # must be checked, but once absent, it can only appear after a draw.
        half = _halves.get(place, 1)
        if half:
            half = states().numpy["has_gauss"]
            _halves.clear()
            _halves[place] = half
        return (*place, half)

    return read


_python = _python_in_memory()
_numpy = _numpy_in_memory()
_torch = _torch_in_memory()
