"""Names of devices: torch's, and TensorFlow's for the same devices.

Without torch: ``quorate doctor`` reads names where torch cannot be imported.
"""

from __future__ import annotations

import re

# "gpu", "gpu:1", "/gpu:1", "/device:GPU:1", and the same of the CPU.
TENSORFLOW_NAME = re.compile(r"/?(?:device:)?(gpu|cpu)(:[0-9]+)?", re.IGNORECASE)


def in_torch(name: str) -> str:
    """Return the name that torch has for what TensorFlow may call otherwise."""
    match = TENSORFLOW_NAME.fullmatch(name)
    if match is None:
        return name
    kind, number = match.groups(default="")
    return ("cuda" if kind.lower() == "gpu" else "cpu") + number
