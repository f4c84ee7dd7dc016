"""Running the client of a package registry."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from quorate.errors import DataError


def run(
    command: Sequence[str],
    scratch: Path,
    *,
    package: str,
    needs: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a command in a directory, without input.

    Args:
        command: The program and its arguments.
        scratch: The directory to run it in, which may be filled.
        package: What it is run for, in messages.
        needs: What must be installed for it, in messages.
        timeout_s: The command is killed after so long.
        env: Its whole environment; None for this process's.

    Returns:
        Its exit code, and the last line that it wrote to stderr.

    Raises:
        DataError: there is no such command, or it took too long.
    """
    try:
        done = subprocess.run(
            command,
            cwd=scratch,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise DataError(package, got=f"no command {command[0]}", expected=needs) from None
    except subprocess.TimeoutExpired:
        late = f"no end of {command[0]} after {timeout_s:g} s"
        raise DataError(package, got=late, expected="an archive") from None
    lines = done.stderr.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return done.returncode, last
