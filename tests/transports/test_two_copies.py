"""Two copies of an entry: a reader finds a whole one in any state that memory may be in.

Memory shows the stores of another processor in any order (ARM) and as far as they went.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quorate.transports.two_copies import TwoCopies
from quorate.transports.worker_status import Timesheet

CONTENT = 104
SIZE = TwoCopies.room(CONTENT)


def entry(version: int) -> tuple[int, bytes]:
    return version, bytes([version % 256]) * (CONTENT - version % 5)


def written(*versions: int, start: int = 0) -> tuple[bytearray, TwoCopies]:
    memory = bytearray(start + SIZE)
    copies = TwoCopies(memory, start, CONTENT)
    for version in versions:
        copies.write(*entry(version))
    return memory, copies


def test_the_newest_entry_is_read_and_memory_beside_it_stays() -> None:
    memory, copies = written(start=8)
    assert copies.read() == (0, b"")
    for version in range(1, 300):
        copies.write(*entry(version))
        assert copies.read() == entry(version)
        assert copies.last_version() == version
    assert memory[:8] == bytes(8)


@pytest.mark.parametrize("last", [1, 2, 7])
def test_a_write_of_which_any_part_is_visible_is_not_read_before_it_is_whole(last: int) -> None:
    """New version with old content, half of the content, single bytes: each way and mixed."""
    before, _ = written(*range(1, last))
    after, whole = written(*range(1, last + 1))
    changed = [at for at in range(SIZE) if before[at] != after[at]]
    words = [range(at, at + 8) for at in range(0, SIZE, 8)]
    chance = random.Random(last)
    parts = [
        *([at] for at in changed),
        *([at for at in changed if at != without] for without in changed),
        *(changed[:end] for end in range(len(changed))),
        *(changed[end:] for end in range(1, len(changed))),
        *(word for word in words),
        *(chance.sample(changed, chance.randrange(len(changed))) for _ in range(2000)),
    ]
    for visible in parts:
        memory = bytearray(before)
        for at in visible:
            memory[at] = after[at]
        if memory != after:
            expected = entry(last - 1) if last > 1 else (0, b"")
            assert TwoCopies(memory, 0, CONTENT).read() == expected, visible
    assert whole.read() == entry(last)


def test_a_writer_that_follows_one_killed_in_a_write_overwrites_the_torn_copy() -> None:
    memory, copies = written(1, 2)
    after, _ = written(1, 2, 3)
    memory[SIZE // 2 : SIZE // 2 + 40] = after[SIZE // 2 : SIZE // 2 + 40]  # its beginning
    assert copies.last_version() == 3
    version, content = copies.read()
    assert (version, content) == entry(2)
    copies.write(*entry(version + 1))
    assert copies.read() == entry(3)


class Overtaken(bytearray):
    """Memory that is written once while a reader is between the two copies."""

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


def test_memory_of_which_no_copy_is_whole_counts_as_empty_and_can_be_written() -> None:
    memory = bytearray(random.Random(0).randbytes(SIZE))
    copies = TwoCopies(memory, 0, CONTENT)
    assert copies.read() == (0, b"")
    for version in (1, 2):
        copies.write(*entry(version))
        assert copies.read() == entry(version)


def test_a_timesheet_of_which_the_new_version_came_before_the_content_is_the_old_one() -> None:
    memory = bytearray(Timesheet.SIZE)
    sheet = Timesheet(memory)
    for phase in ("starting", "waiting"):
        sheet.tell(phase)
    sheet.tell("fetching", 4, 1)
    before = bytes(memory)
    sheet.tell("forward", 4, 1)
    for start in (0, Timesheet.SIZE // 2):
        torn = bytearray(before)
        torn[start : start + 8] = memory[start : start + 8]
        assert Timesheet(torn).read()[:3] == ("fetching", 4, 1)
    assert sheet.read()[:3] == ("forward", 4, 1)
