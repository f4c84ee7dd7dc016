"""A control group with a limit of memory, if the machine allows such a group."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield the name of a new group; the test is skipped where none can be made."""
    version_1 = (ROOT / "memory" / "memory.limit_in_bytes").exists()
    parent = ROOT / "memory" if version_1 else ROOT
    group = parent / f"quorate-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
        limit.write_text(str(limit_bytes))
        yield group
    except OSError as error:
        pytest.skip(f"no limit can be set: {error}")
    finally:
        deadline = time.monotonic() + 60
        while group.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # the kernel may not know yet of the processes' end
                group.rmdir()
            time.sleep(0.05)


def inside(group: Path, words: list[str]) -> list[str]:
    """Return the command line that runs a second command line in a group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]
