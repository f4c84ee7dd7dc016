"""Names of devices: torch's names, and TensorFlow's names for the same devices.

Free of torch: ``quorate doctor`` parses names even if torch cannot be imported.
"""

from __future__ import annotations

import re

# "gpu", "gpu:1", "/gpu:1", "/device:GPU:1", and the same with "cpu".
TENSORFLOW_NAME = re.compile(r"/?(?:device:)?(gpu|cpu)(:[0-9]+)?", re.IGNORECASE)


def in_torch(name: str) -> str:
    """Return torch's name for a device name of torch or TensorFlow."""
    match = TENSORFLOW_NAME.fullmatch(name)
    if match is None:
        return name
    kind, number = match.groups(default="")
    return ("cuda" if kind.lower() == "gpu" else "cpu") + number
