"""What a process says of itself: how it was started, and what it has."""

from __future__ import annotations

# Code for the top of a script: leaves a dict in ``about``.
ABOUT_ITSELF = """
import json, os, random, signal, sys, numpy, torch
from pathlib import Path
def links(pid):
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except OSError:
            pass
    return found
def does_nothing(handler):  # or is one of quorate's own, which a program that it starts has not
    return handler == signal.SIG_IGN or (
        callable(handler) and handler is not signal.default_int_handler)
def tasks(pid):
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
about = {
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(),
    "group": os.getpgid(0) == os.getpid(),
    "fds": links("self"), "tasks": tasks("self"),
    "ignored": [n for n in range(1, 32) if does_nothing(signal.getsignal(n))],
    "command": Path("/proc/self/cmdline").read_text().split("\\0"),
    "random": [random.random(), float(numpy.random.rand()), torch.initial_seed()],
    "spins": os.environ.get("OMP_WAIT_POLICY"), "threads": torch.get_num_threads(),
}
"""


def kind(link: str) -> str:
    return link.rpartition("/")[0] if link.startswith("/") else link.partition(":")[0]
