"""Settings of a process or thread, for blocks that overlap and end in any order.

Several loops over updates may be open at a time, and any of them may end first. If each loop
restored the value of its begin, the first to end would change the setting under the others, and the
last to end would leave the value of another loop behind. Loops that take turns each compute with
their own values: see ``renewal``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Block(Generic[T]):
    """A block in progress."""

    def __init__(self, value: T) -> None:
        self.value = value


class SharedSetting(Generic[T]):
    """A setting shared by blocks.

    Args:
        read: returns the present value.
        write: sets a value.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None]) -> None:
        self._read, self._write = read, write
        # Reentrant: the garbage collector may end an abandoned loop while this thread has the lock.
        self._lock = threading.RLock()
        self._blocks: list[_Block[T]] = []  # in progress, in the order of their begins
        self.counting: _Block[T] | None = None  # the block whose value is set

    @contextmanager
    def at(self, value: T) -> Iterator[T]:
        """Set a value inside the block. Of overlapping blocks, the last to begin counts.

        After the block the value is that of another block in progress, or else that before the
        first block. A value set by other code inside the block remains.

        Yields:
            The value before.
        """
        block = _Block(value)
        with self._lock:
            before = self._read()
            if not self._blocks:
                self._outside = self._read()
            self._blocks.append(block)
            self._count(block)
        try:
            yield before
        finally:
            with self._lock:
                self._blocks.remove(block)
                last = self._blocks[-1] if self._blocks else None
                if self._read() == self._ours:
                    self._count(last)
                self.counting = last

    def renew(self, block: _Block[T] | None) -> None:
        """Set the value of a block again, if the block is in progress."""
        with self._lock:
            if block in self._blocks:
                self._count(block)

    def _count(self, block: _Block[T] | None) -> None:
        self.counting, value = block, self._outside if block is None else block.value
        if value != self._read():  # Python rounds its wait down at each write
            self._write(value)
        self._ours = self._read()


def renewal(settings: Iterable[SharedSetting[Any]]) -> Callable[[], None]:
    """Return a function that sets the present values again, after turns of other loops."""
    counting = [(setting, setting.counting) for setting in settings]

    def renew() -> None:
        for setting, block in counting:
            if setting.counting is not block:
                setting.renew(block)

    return renew
