"""The position of torch's default generator in its sequence of numbers, read from memory.

``get_state()`` makes a tensor of 5 KB, of which a few words tell whether a number was drawn. These
words are read from the object's memory, if a trial generator shows that they lie at the expected
place: at::CPUGeneratorImpl of ATen/CPUGeneratorImpl.h and the mt19937 of
ATen/core/MT19937RNGEngine.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from struct import Struct

import torch

from quorate.replica.quick.torch_calls import address_of

WORDS = 624  # of the state of a Mersenne Twister, 4 bytes each; 8 in the result of get_state()
_HEADER = 24  # bytes before the words in the result of get_state()

# Of the object: before the words lie the seed, the number of words left, whether the generator was
# seeded, and the index of the next word. Two words of the state are read too; the state is made
# anew each time all words are used.
_PLACE, _SEEN_WORDS = Struct("=Qi?3xIII"), 8  # bytes
# Behind the words, aligned to 8 bytes, lies the second number of a pair of normal numbers: an
# optional float (8 bytes, a flag in the fifth) and an optional double (16 bytes, a flag in the
# ninth).
_FLOAT_FLAG, _DOUBLE_FLAG = 4, 8 + 8
_FIRST, _LAST = 40, 256  # range of the words' first byte, behind a lock of system-dependent size


def reader(generator: torch.Generator) -> Callable[[], Hashable] | None:
    """Return a function whose result changes with each draw or seed of a CPU generator: 0.5 us.

    The result is None while the second number of a normal pair is left: then the state has to be
    read by ``get_state()``. ``reader`` returns None if the generator's memory is not as expected.
    """
    tried = torch.Generator().manual_seed(1)
    at = _where(tried)
    if at is None or _where(generator) != at or not _tells(tried, at):
        return None
    return _reader(generator, at)


def _reader(generator: torch.Generator, at: int) -> Callable[[], Hashable]:
    address = address_of(generator)
    assert address is not None
    behind = -(-(address + at + 4 * WORDS) // 8) * 8
    place = (ctypes.c_char * _PLACE.size).from_address(address + at + _SEEN_WORDS - _PLACE.size)
    has_float = ctypes.c_ubyte.from_address(behind + _FLOAT_FLAG)
    has_double = ctypes.c_ubyte.from_address(behind + _DOUBLE_FLAG)
    unpack = _PLACE.unpack_from

    def read() -> Hashable:
        return None if has_double.value or has_float.value else unpack(place)

    return read


def _where(generator: torch.Generator) -> int | None:
    """Return the offset of the state's words in a generator's object, in bytes."""
    address = address_of(generator)
    state = generator.get_state()
    if address is None or state.numel() < _HEADER + 8 * WORDS:
        return None
    wide = state[_HEADER : _HEADER + 8 * WORDS].view(torch.int64)
    words = wide.to(torch.int32).numpy().tobytes()
    for at in range(_FIRST, _LAST, 4):
        # No byte behind the object is read, wherever the words are.
        if ctypes.string_at(address + at, 8) == words[:8]:
            return at if ctypes.string_at(address + at, len(words)) == words else None
    return None


def _tells(tried: torch.Generator, at: int) -> bool:
    """Return whether draws of all kinds change the result, and restored states restore it."""
    read = _reader(tried, at)
    seen, states = [read()], [tried.get_state()]
    for dtype in (torch.float32, torch.float64):
        one = torch.empty((), dtype=dtype, device="cpu")
        for draw in (one.uniform_, one.normal_, one.normal_):  # the last is the second of a pair
            draw(generator=tried)
            seen.append(read())
            states.append(tried.get_state())
    many = torch.empty(2 * WORDS, dtype=torch.float32, device="cpu")
    for words in (WORDS, 2 * WORDS):  # through a whole state, to another
        many[:words].uniform_(generator=tried)
        seen.append(read())
        states.append(tried.get_state())
    known = [each for each in seen if each is not None]
    if len({*known}) < len(known) or seen.count(None) != 2:
        return False
    for state, place in zip(states, seen, strict=True):
        tried.set_state(state)
        if read() != place:
            return False
    return True
