"""A process that runs the command ``quorate`` of one source tree, one run at a time.

    PYTHONPATH=TREE/src python tree_driver.py TREE

Reads a line of JSON for each run and answers with a line of JSON: see ``trees``. Runs are forks of
the tree's own warm process (``tests/support/warm.py``), because that file knows the imports of the
tree. The driver uses no name of the tree but ``WARM``, so any commit with that name can be a base.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(sys.argv[1], "tests")))

from support.warm import WARM

import quorate

TREE = Path(sys.argv[1])
PR_SET_CHILD_SUBREAPER = 36
LEFT_S = 30  # for the processes of a run whose main process has ended


def children() -> set[psutil.Process]:
    """Return the child processes that have not ended, and reap those that have."""
    found = set()
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            child.wait()
        else:
            found.add(child)
    return found


def wait_for_others(stay: set[psutil.Process]) -> list[str]:
    """Wait until a run has no process any more; kill and return those that do not end."""
    until = time.monotonic() + LEFT_S
    while others := children() - stay:
        if time.monotonic() > until:
            lines = [" ".join(child.cmdline()) for child in others]
            for child in others:
                child.kill()
                child.wait()
            return lines
        time.sleep(0.01)
    return []


def main() -> None:
    """Serve until the input ends."""
    assert Path(quorate.__file__).is_relative_to(TREE), quorate.__file__
    # Processes of a run whose main process was killed become children of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    stay: set[psutil.Process] | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if stay is None:
            WARM.run(["--version"], asked["env"], asked["limit_s"])
            stay = children()
        try:
            code, out, err = WARM.run(asked["arguments"], asked["env"], asked["limit_s"])
        except subprocess.TimeoutExpired as late:
            code, out, err = None, "", "\n".join(late.__notes__)
        left = wait_for_others(stay)
        print(json.dumps({"code": code, "out": out, "err": err, "left": left}), flush=True)


if __name__ == "__main__":
    main()
