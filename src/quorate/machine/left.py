"""The end of the program by a signal, wherever the main thread is."""

from __future__ import annotations

import threading


class LeftError(SystemExit):
    """A signal asked for an end at once: no ``sys.exit()`` of the code that it interrupts."""


def ends_program(error: BaseException) -> bool:
    """Return whether what was raised is Ctrl-C or a signal's: they come to the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return isinstance(error, (KeyboardInterrupt, LeftError)) and is_main
