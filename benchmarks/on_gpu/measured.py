"""A measurement: a process of its own, which says what it found or what it raised."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).parents[1] / "gpu.py"
LIMIT_S = 1800  # of one measurement: compiling takes minutes


class Failed(NamedTuple):
    """A measurement that could not be made: what its process raised."""

    why: str

    def __str__(self) -> str:
        return f"failed: {self.why}"


def measured(role: str, **arguments: Any) -> Any:
    """What a role returns, computed by a process of its own."""
    words = [sys.executable, str(SCRIPT), "--role", json.dumps({"role": role, **arguments})]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Failed(f"no end within {LIMIT_S} s")
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        raised = [
            line for line in ended.stderr.splitlines() if re.match(r"[\w.]+(Error|Exit)\b", line)
        ]
        return Failed((raised or [f"exit code {ended.returncode}"])[-1])
    return json.loads(ended.stdout.splitlines()[-1])
