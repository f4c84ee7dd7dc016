"""Keys of JSON: read by other programs, and never changed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_OURS = (".hyperparameters[]", ".environment.")  # torch's; the user's


def keys_of(value: Any) -> str:
    """Return the paths of all keys, a line each; ``[]`` stands for any item, ``N`` for a number."""
    ours = (path for path in _paths(value, "") if not any(part in path for part in NOT_OURS))
    return "\n".join(sorted({*ours}))


def keys_in(path: Path) -> str:
    """Return the keys of a file of JSON, or of lines of JSON."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    return keys_of([json.loads(line) for line in lines])


def _paths(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _paths(item, f"{place}[]")
    elif isinstance(value, dict):
        for name, item in value.items():
            inner = f"{place}.{'N' if str(name).isdigit() else name}"
            yield inner
            yield from _paths(item, inner)
