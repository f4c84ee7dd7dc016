"""The sweeper: a process that ends what a local cluster leaves behind, however its run ended.

Ray's own processes look after each other, and one of them takes a minute to see that the program
they were started for was killed. This one reads a pipe that is cut in that moment, or says "end".

    python sweeper.py MARK

MARK is a word that is in the environment of all that is to end, and of nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the run says when it ends


def alive(mark: str) -> list[int]:
    """Return the pids of all processes that have a word in their environment."""
    found = list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if mark.encode() in (entry / "environ").read_bytes():  # a zombie has none
                found.append(int(entry.name))
    return found


def _main() -> None:
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)
    while pids := alive(sys.argv[1]):  # again: one that is killed may just have started another
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    _main()
