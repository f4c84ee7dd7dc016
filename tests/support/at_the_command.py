"""The quorate command, in a separate process."""

import os
import subprocess
import sys

COMMANDS = ("run", "runs", "inspect", "report", "verify", "bench", "plan", "doctor", "convert")
LIMIT_S = 300  # on a busy machine
QUORATE = [sys.executable, "-m", "quorate"]


def ended(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to the end, with some of the environment set."""
    env = {**os.environ, **environment}
    return subprocess.run(
        [*QUORATE, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=env,
        check=False,
    )
