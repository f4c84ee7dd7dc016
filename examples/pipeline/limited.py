"""Run a script whose processes may take so much memory each, by control groups. Needs root, Linux.

    python limited.py --mib 560 train.py --devices cpu+cpu --split decoder

The main process is in a group of its own, and so are the processes of each device: its stage, and
what makes updates for it. The kernel ends a process whose group would take more. What each group
took at most is shown in the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.util
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
IS_FIRST = (ROOT / "memory" / "memory.limit_in_bytes").exists()  # version 1 of the interface
PARENT = ROOT / "memory" if IS_FIRST else ROOT
FOLDER = "QUORATE_EXAMPLE_GROUPS"
LIMIT, PEAK = (
    ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    if IS_FIRST
    else ("memory.max", "memory.peak")
)


def join_groups() -> None:
    """Have the processes that are forked from now on be in the group of their device."""
    if FOLDER in os.environ:
        multiprocessing.util.register_after_fork(sys, lambda _: _join())


def _join() -> None:
    name = multiprocessing.current_process().name  # quorate-stage-1, quorate-part-1
    if found := re.fullmatch(r"quorate-(?:stage|part)-(\d)", name):
        group = Path(f"{os.environ[FOLDER]}-device-{found[1]}")
        (group / "cgroup.procs").write_text(str(os.getpid()))


def main() -> None:
    """Make the groups, run the script, and show what was taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, required=True, help="of each group")
    parser.add_argument("--devices-at-most", type=int, default=2, help="groups for so many")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    first = PARENT / f"quorate-example-{os.getpid()}"
    groups = {"main": Path(f"{first}-main")}
    for number in range(args.devices_at_most):
        groups[f"device {number}"] = Path(f"{first}-device-{number}")
    try:
        for group in groups.values():
            group.mkdir()
            (group / LIMIT).write_text(str(args.mib << 20))
        # It joins the group before it is Python: all that it takes is counted.
        inside = f'echo $$ > {groups["main"]}/cgroup.procs && exec "$@"'
        words = ["sh", "-c", inside, "sh", sys.executable, *args.command]
        ended = subprocess.run(words, check=False, env={**os.environ, FOLDER: str(first)})
        for name, group in groups.items():
            with suppress(OSError):  # older kernels do not count it
                peak = int((group / PEAK).read_text()) >> 20
                if peak:  # else no process was in it
                    print(f"{name}: at most {peak} of {args.mib} MiB")
        if ended.returncode < 0:
            print(f"the main process was ended by signal {-ended.returncode}")
    finally:
        for group in groups.values():
            _remove(group)
    sys.exit(1 if ended.returncode else 0)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 60
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):  # the kernel may not know yet that its processes are gone
            group.rmdir()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
