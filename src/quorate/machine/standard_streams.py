"""Standard output and error: closed, full or broken streams end no run.

Whoever reads them may be gone (``| head``), their disk may be full, and a daemon has none. What
cannot be written is dropped then, and the descriptor leads nowhere from there on: what is in its
buffer, and what others print to it, can fail no more, also not when the interpreter ends.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from quorate.machine.limits import FULL_PIPE_S


class Steady:
    """A text stream to which writing never fails; all remaining attributes are the stream's.

    Any thread may write to it, as to any stream.

    Args:
        stream: where it is written; None: the process has none.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        # Why nothing is written any more; None as long as all is.
        self.fault: str | None = "it is closed" if stream is None or stream.closed else None

    def write(self, text: str) -> int:
        """Write a text, or drop the text. Blocks as the stream does."""
        if self.stream is not None and self.fault is None:
            try:
                return self.stream.write(text)
            except UnicodeEncodeError:  # a path, say, in a locale that does not have its letters
                encoding = self.stream.encoding or "ascii"
                return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except BlockingIOError as error:
                if not self._drains():
                    self._give_up(error)
            except (OSError, ValueError) as error:  # ValueError: it was closed
                self._give_up(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts, or drop the texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the stream's buffer, or drop the text. Blocks as the stream does."""
        if self.stream is None or self.fault is not None:
            return
        try:
            self.stream.flush()
        except BlockingIOError as error:
            if not self._drains():
                self._give_up(error)
        except (OSError, ValueError) as error:
            self._give_up(error)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self.fault is None and self.stream is not None and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _drains(self) -> bool:
        """Return whether a full pipe takes the text in the buffer in time."""
        assert self.stream is not None
        until = time.monotonic() + FULL_PIPE_S
        poll = select.poll()  # select() takes no descriptor above 1023
        while (left_s := until - time.monotonic()) > 0:
            try:
                poll.register(self.stream.fileno(), select.POLLOUT)
                poll.poll(left_s * 1000)
                self.stream.flush()
            except BlockingIOError:
                continue
            except (OSError, ValueError):
                return False
            return True
        return False

    def _give_up(self, error: Exception) -> None:
        """Write no more, and let the descriptor lead nowhere, for all writers."""
        self.fault = (error.strerror if isinstance(error, OSError) else None) or str(error)
        stream = self.stream
        if stream is None or not any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
            return  # somebody's own file
        with suppress(OSError, ValueError):
            descriptor = stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            if null != descriptor:  # else it was closed, and is open again
                os.close(null)
            stream.flush()  # what was left in its buffer: it would fail once more at exit
        occupy_standard_descriptors()


@contextmanager
def steady() -> Iterator[Steady]:
    """Within the block ``sys.stdout`` and ``sys.stderr`` are steady; yield the former.

    Those that somebody has put there instead (a test, a notebook) stay, and are used through what
    is yielded.
    """
    occupy_standard_descriptors()
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    ours: dict[str, Steady] = {}
    for name, stream in before.items():
        if isinstance(stream, Steady):
            ours[name] = stream
            continue
        ours[name] = Steady(stream)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, ours[name])
    try:
        yield ours["stdout"]
    finally:
        for name, stream in before.items():
            ours[name].flush()  # at exit it would fail with an exit code of its own
            if getattr(sys, name) is ours[name]:
                setattr(sys, name, stream)


def flush_standard_streams() -> None:
    """Flush ``sys.stdout`` and ``sys.stderr``; skip a stream that is missing, closed or broken.

    A process that was started with a closed descriptor 1 or 2 (``>&-``) has None for the stream.
    Call this before a fork, which would copy the text in the buffers, and before ``os._exit``,
    which would drop it.
    """
    for stream in (sys.stdout, sys.stderr):
        Steady(stream).flush()


def inherited_by_children() -> tuple[int | None, int | None]:
    """Return what ``subprocess`` is to give a child as standard output and error.

    None is this process's own. A descriptor 1 that was closed at its start may be a file of the
    user's by now.
    """
    stdout, stderr = (
        subprocess.DEVNULL if stream is None or stream.closed else None
        for stream in (sys.__stdout__, sys.__stderr__)
    )
    return stdout, stderr


def occupy_standard_descriptors() -> None:
    """Open the null device in the place of closed descriptors 0, 1 and 2.

    Else the next socket or segment gets such a number, and whatever a library prints, or a child
    takes for its standard output, goes there.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free one
