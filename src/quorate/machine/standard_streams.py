"""Standard output and error: closed, full or broken streams never end a run.

The reader of a stream may be gone (``| head``), the disk may be full, and a daemon has no streams.
From the first failure on, output is dropped and the descriptor points to the null device: neither
the stream's buffer nor output of other code can fail any more, not even at the interpreter's exit.
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
        stream: the wrapped stream; None: the process has none.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        # Why output is dropped; None while writing works.
        self.fault: str | None = "it is closed" if stream is None or stream.closed else None

    def write(self, text: str) -> int:
        """Write a text, or drop the text. Blocks as the stream does."""
        if self.stream is not None and self.fault is None:
            try:
                return self.stream.write(text)
            except UnicodeEncodeError:  # a path with letters outside the locale's encoding, say
                encoding = self.stream.encoding or "ascii"
                return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except BlockingIOError as error:
                if not self._drains():
                    self._give_up(error)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
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
        """Return whether a full pipe accepts the buffered text in time."""
        assert self.stream is not None
        until = time.monotonic() + FULL_PIPE_S
        poll = select.poll()  # select() accepts no descriptor above 1023
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
        """Write no more, and point the descriptor to the null device for all writers."""
        self.fault = (error.strerror if isinstance(error, OSError) else None) or str(error)
        stream = self.stream
        if stream is None or not any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
            return  # a file of the caller's own
        with suppress(OSError, ValueError):
            descriptor = stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            if null != descriptor:  # equal if the descriptor was closed: it is open again now
                os.close(null)
            stream.flush()  # the rest of the buffer, which would fail again at exit
        occupy_standard_descriptors()


@contextmanager
def steady() -> Iterator[Steady]:
    """Make ``sys.stdout`` and ``sys.stderr`` steady within the block; yield the steady stdout.

    Streams replaced by other code (a test, a notebook) stay in place; only the yielded object wraps
    them.
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
            ours[name].flush()  # at exit a failing flush would set an exit code of its own
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
    """Return the standard output and error for a child of ``subprocess``.

    None stands for this process's own stream. If descriptor 1 was closed at the start, the number
    may belong to a file of the user by now.
    """
    stdout, stderr = (
        subprocess.DEVNULL if stream is None or stream.closed else None
        for stream in (sys.__stdout__, sys.__stderr__)
    )
    return stdout, stderr


def occupy_standard_descriptors() -> None:
    """Open the null device in the place of closed descriptors 0, 1 and 2.

    Otherwise the next socket or segment would get such a number, and would receive all output of
    libraries and of child processes.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free one
