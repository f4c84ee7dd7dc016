"""The sweeper: a process that ends what a local cluster leaves behind, however its run ended.

Ray's own processes look after each other, and one of them takes a minute to see that the program
they were started for was killed. This one reads a pipe that is cut in that moment, or says "end".

    python sweeper.py MARK FOLDER

MARK is a word that is in the environment of all that is to end, and of nothing else. FOLDER is
removed. Either may be empty: the cluster is not the run's own. The first line that is read is the
path of the raylet's socket. Ray ends a driver that calls Ray after the end of the raylet, at once
and without a word: where that is what became of the run, the sweeper says so in its place.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

END = "end"
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the run says when it ends


def alive(mark: str) -> list[int]:
    """Return the pids of all processes that have a word in their environment."""
    found = list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if mark.encode() in (entry / "environ").read_bytes():  # a zombie has none
                found.append(int(entry.name))
    return found


def ended_with_raylet(path: str) -> str | None:
    """Return what is to be said of a run that ended without a word; None if its raylet lives.

    Args:
        path: of the socket of its raylet.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return (
                "quorate: Ray's raylet on this machine has ended, so Ray has ended the run; run "
                "the same command again to resume from the newest checkpoint"
            )
        except OSError:  # it cannot be asked
            return None
    return None


def _main() -> None:
    mark, folder = sys.argv[1:]
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    path, word = "", ""
    for line in sys.stdin:
        path, word = path or line.strip(), line.strip()
        if word == END:
            break
    said = ended_with_raylet(path) if word != END and path else None
    while mark and (pids := alive(mark)):  # again: one that is killed may have started another
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    if said is not None and sys.stderr is not None:  # None: print() would write to stdout
        print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _main()
