"""Two copies of an entry: a reader finds a whole entry in any possible state of memory.

Memory shows the stores of another processor in any order (ARM), up to some point.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from quorate.engines.two_copies import TwoCopies

CONTENT = 104
SIZE = TwoCopies.room(CONTENT)


def entry(version: int) -> tuple[int, bytes]:
    return version, bytes([version % 256]) * (CONTENT - version % 5)


def written(*versions: int) -> tuple[bytearray, TwoCopies]:
    memory = bytearray(SIZE)
    copies = TwoCopies(memory, 0, CONTENT)
    assert copies.read() == (0, b"")
    for version in versions:
        copies.write(*entry(version))
        assert copies.read() == entry(version)
        assert copies.last_version() == version
    return memory, copies


@pytest.mark.parametrize("last", [1, 2, 7, 300])
def test_a_write_of_which_any_part_is_visible_is_not_read_before_it_is_whole(last: int) -> None:
    """New version with old content, half of the content, single bytes: each way and mixed."""
    before, _ = written(*range(1, last))
    after, _ = written(*range(1, last + 1))
    changed = [at for at in range(SIZE) if before[at] != after[at]]
    chance = random.Random(last)
    parts = [
        *([at] for at in changed),
        *([at for at in changed if at != without] for without in changed),
        *(changed[:end] for end in range(len(changed))),
        *(changed[end:] for end in range(1, len(changed))),
        *(range(at, at + 8) for at in range(0, SIZE, 8)),
        *(chance.sample(changed, chance.randrange(len(changed))) for _ in range(2000)),
    ]
    for visible in parts:
        memory = bytearray(before)
        for at in visible:
            memory[at] = after[at]
        if memory != after:
            expected = entry(last - 1) if last > 1 else (0, b"")
            assert TwoCopies(memory, 0, CONTENT).read() == expected, visible


def test_memory_of_which_no_copy_is_whole_counts_as_empty_and_memory_beside_it_stays() -> None:
    memory = bytearray(8) + random.Random(0).randbytes(SIZE) + bytes(8)
    copies = TwoCopies(memory, 8, CONTENT)
    assert copies.read() == (0, b"")
    for version in range(1, 5):
        copies.write(*entry(version))
        assert copies.read() == entry(version)
    assert memory[:8] == memory[-8:] == bytes(8)


def test_a_writer_that_follows_one_killed_in_a_write_overwrites_the_torn_copy() -> None:
    memory, copies = written(1, 2)
    after, _ = written(1, 2, 3)
    memory[SIZE // 2 : SIZE // 2 + 40] = after[SIZE // 2 : SIZE // 2 + 40]  # the entry's beginning
    assert copies.last_version() == 3
    assert copies.read() == entry(2)
    copies.write(*entry(3))
    assert copies.read() == entry(3)


class Overtaken(bytearray):
    """Memory with a write while a reader is between the two copies."""

    write: Callable[[], None] | None = None

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        write, self.write = self.write, None
        if write is not None:
            write()
        return found


def test_an_entry_that_was_overtaken_while_it_was_read_is_not_returned() -> None:
    """Copy 0 is read with version 2; then versions 3 and 4 are written, and half of 5."""
    memory = Overtaken(SIZE)
    copies = TwoCopies(memory, 0, CONTENT)
    copies.write(*entry(1))
    copies.write(*entry(2))

    def overtake() -> None:
        for version in (3, 4, 5):
            copies.write(*entry(version))
        memory[SIZE - 40 : SIZE] = bytes(40)

    memory.write = overtake
    assert copies.read() == entry(4)
