"""Who is at work: which stage the process of each device computes, for whoever waits for one.

A process writes a word when it begins to compute and when it begins to wait for others. It may be
killed or stopped anywhere: nobody waits for a word, and none is ever locked.
"""

from __future__ import annotations

from mmap import mmap

_WORD_BYTES = 8


class AtWork:
    """Words in memory that forks share. Make it before them.

    Args:
        devices: how many processes.
    """

    def __init__(self, devices: int) -> None:
        # 2 * stage + 1: it computes; 2 * stage: it waits for that stage's turn. Native words of a
        # memoryview are written and read as a whole; struct goes through them byte by byte.
        self._words = memoryview(mmap(-1, _WORD_BYTES * max(1, devices))).cast("q")
        for device in range(devices):
            self.waits(device, device)

    def computes(self, device: int, stage: int) -> None:
        """Note that a process begins to compute."""
        self._words[device] = 2 * stage + 1

    def waits(self, device: int, stage: int) -> None:
        """Note that a process begins to wait, for what a stage of its own takes."""
        self._words[device] = 2 * stage

    def read(self, device: int) -> tuple[int, bool]:
        """Return the stage that a process is at, and whether it computes."""
        word = self._words[device]
        return word // 2, bool(word % 2)
