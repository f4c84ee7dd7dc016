"""The sweeper: a process that ends the rest of a local cluster after any end of the run.

Ray's own processes look after each other, and take up to a minute to see that the run was killed.
The sweeper reads a pipe: the pipe is cut in the moment of a kill, or says "end".

    python sweeper.py MARK FOLDER

MARK is a word in the environment of all processes of the cluster, and of no further process.
FOLDER is removed. Both are empty if the cluster is not the run's own. The first line from the pipe
is the path of the raylet's socket. After the end of the raylet Ray ends a driver at its next call,
at once and without a word: in this case the sweeper says how the run ended.
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
        with suppress(OSError):  # the process has ended, or is a different user's
            if mark.encode() in (entry / "environ").read_bytes():  # a zombie has none
                found.append(int(entry.name))
    return found


def ended_with_raylet(path: str) -> str | None:
    """Return a line about a run that ended without a word; None if the raylet lives.

    Args:
        path: of the socket of the run's raylet.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return (
                "quorate: Ray's raylet on this machine has ended, so Ray has ended the run; run "
                "the same command again to resume from the newest checkpoint"
            )
        except OSError:  # nobody knows
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
    while mark and (pids := alive(mark)):  # again: a killed process may have started a new one
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
