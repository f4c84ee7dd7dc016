"""The start of a process tied to its parent: the process dies even if signal 9 kills the parent.

Run as a script, this file begins a worker's process: tied to the parent before any slow import, so
that at no moment the process could be left behind. Then the file calls ``run`` of a module.

    python dies_with_parent.py PARENT_PID MODULE SYS_PATH_JSON ARGUMENTS_JSON
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

# Signals sent to all processes of a job: by Ctrl-C or the end of a terminal, and by a cluster as
# SIGTERM with an earlier warning. Only the coordinator acts on these signals.
JOB_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
]


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread that started it ends.

    By SIGKILL, so that a stopped process dies too. Without such a kernel call a thread looks at
    the parent twice a second.

    Args:
        parent: pid of the parent, read by the parent itself. ``os.getppid`` of an orphan returns
            the pid of the adopting process.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent had already ended
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _main() -> None:
    import json
    from importlib import import_module

    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent, module, path, arguments = sys.argv[1:5]
    die_with(int(parent))
    sys.path[:] = json.loads(path)  # without this file's folder
    import_module(module).run(**json.loads(arguments))


if __name__ == "__main__":
    _main()
