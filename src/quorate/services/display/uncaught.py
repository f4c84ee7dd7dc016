"""The output for an exception that ends the program: the user's frames, with quorate's folded.

Between a script's call of ``fit`` and its loss function lie twenty frames of this package, and the
frame that matters is the last. The printed traceback replaces these frames by their number, and
omits the launcher before the script. The exception itself is unchanged, for code that catches it.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException
from types import TracebackType

from quorate.errors import Hook, OneLineError, QuorateError, cut, show_one_line_errors
from quorate.machine.environment import (
    is_first_rank_here,
    torchrun_error_file,
    wants_full_tracebacks,
)
from quorate.machine.limits import FIRST_RANK_S

MOST = 200_000  # most characters to print

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LAUNCHER = str(Path(_PACKAGE, "commands", "main.py"))
_LIBRARY = str(sysconfig.get_path("stdlib")) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_FOLDED = "<folded>"  # stands for a file's name in a folded frame

_shown_before: Hook | None = None  # the hook before ours; None: not replaced yet


def fold_tracebacks() -> None:
    """Print exceptions that end the program folded from now on, and quorate's own as one line.

    A hook installed by another library is left in place.
    """
    global _shown_before
    if _shown_before is None and show_one_line_errors():
        _shown_before, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _shown_before is not None
    is_full = wants_full_tracebacks()
    if "torch.distributed" in sys.modules:
        from quorate.engines.process_group import refused_call  # imports torch

        if (refusal := refused_call(error)) is not None:
            refusal.__cause__ = error if is_full else None
            kind, error, trace = type(refusal), refusal, None
    if sys.stderr is not None and (is_full or not isinstance(error, OneLineError)):
        with suppress(OSError, ValueError):  # stderr is closed
            lines = traceback.format_exception(kind, error, trace) if is_full else folded(error)
            sys.stderr.writelines(lines)
            sys.stderr.flush()
    if isinstance(error, OneLineError):
        # All ranks of a host raise a user's mistake, and the first rank prints the line. The other
        # ranks wait for torchrun's SIGTERM: torchrun ends all ranks once one of them has ended.
        if told_torchrun(error.line) and not is_first_rank_here():
            time.sleep(FIRST_RANK_S)
            raise SystemExit(error.exit_code)
        _shown_before(kind, error, trace)  # prints the line and sets the exit code


def told_torchrun(line: str) -> bool:
    """Make torchrun report an error's line; return False in a process without torchrun."""
    file = torchrun_error_file()
    if file is None:
        return False
    told = {"py_callstack": line, "timestamp": str(int(time.time()))}
    try:
        file.write_text(json.dumps({"message": {"message": line, "extraInfo": told}}))
    except OSError:
        return False
    return True


def folded(error: BaseException) -> Iterator[str]:
    """Yield Python's text for an exception, with quorate's frames folded and long texts cut."""
    told = TracebackException.from_exception(error, compact=True)
    link: TracebackException | None = told
    while link is not None:
        kind = link.exc_type or BaseException
        link.stack = _FoldedStack.of(link.stack, is_ours=issubclass(kind, QuorateError))
        link = link.__cause__ or link.__context__
    written = left_out = 0
    for text in told.format():
        if written < MOST:
            text = cut(text)
            written += len(text)
            yield text
        else:
            left_out += len(text)
    if left_out:
        yield f"... ({left_out:,} characters are left out)\n"


class _FoldedStack(StackSummary):
    """A stack in which each run of quorate's frames is one line."""

    @classmethod
    def of(cls, stack: StackSummary, *, is_ours: bool) -> _FoldedStack:
        """Return a folded stack.

        Args:
            is_ours: whether the exception is a refusal raised by this package. Otherwise an
                exception whose last frame is quorate's is a bug of quorate, and its frames are
                shown.
        """
        found = cls()
        marked = zip(_hidden(stack, is_ours=is_ours), stack, strict=True)
        for is_hidden, pairs in groupby(marked, key=itemgetter(0)):
            frames = [frame for _, frame in pairs]
            if not is_hidden:
                found += frames
            elif found:  # the launcher's frames, before all others, are dropped silently
                found.append(FrameSummary(_FOLDED, len(frames), "", lookup_line=False))
        return found

    def format_frame_summary(self, frame_summary: FrameSummary, **more: bool) -> str:
        if frame_summary.filename != _FOLDED:
            return super().format_frame_summary(frame_summary, **more)
        number = frame_summary.lineno or 0
        frames = "1 frame" if number == 1 else f"{number} frames"
        return f"  ({frames} of quorate; QUORATE_TRACEBACK=full shows all)\n"


def _hidden(stack: Sequence[FrameSummary], *, is_ours: bool) -> list[bool]:
    """Return for each frame whether the frame is folded."""
    files = [frame.filename for frame in stack]
    of_package = [file.startswith(_PACKAGE) for file in files]
    if True not in of_package or (of_package[-1] and not is_ours):
        return [False] * len(files)
    hidden: list[bool] = []
    for file, is_hidden in zip(files, of_package, strict=True):
        # Frames of Python between quorate's frames, or between quorate and a script: contextlib,
        # runpy.
        of_python = file.startswith((_LIBRARY, "<frozen ")) and not _is_installed(file)
        hidden.append(is_hidden or (of_python and bool(hidden) and hidden[-1]))
    if _LAUNCHER in files:
        launched = files.index(_LAUNCHER)
        hidden[:launched] = [True] * launched
    last = max(n for n, is_hidden in enumerate(of_package) if is_hidden)
    if all(_is_installed(file) or file.startswith(_LIBRARY) for file in files[last + 1 :]):
        hidden[last] = is_ours  # the last frame shows the purpose: a backward pass, say
    return hidden


def _is_installed(file: str) -> bool:
    return any(part in file for part in _INSTALLED)
