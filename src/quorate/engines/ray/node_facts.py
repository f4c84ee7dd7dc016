"""Facts about a node to be compared: another node must have the same packages and the same script.

A node that differs would compute something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from quorate.engines.processes.script import Script

_PACKAGE = Path(__file__).parents[2]


def same_everywhere(script: Script, copy: Script | None = None) -> dict[str, str]:
    """Return the facts about a node that are the same on every node, by their names.

    Args:
        script: as on the host where the run was started.
        copy: as on this host, if the script is elsewhere here.
    """
    here = copy or script
    return {
        **same_packages(),
        f"the script {script.path}": _hash([Path(here.path)]),
        f"the folder {script.folder}": "is there" if Path(here.folder).is_dir() else "not there",
    }


def same_packages() -> dict[str, str]:
    """Return the versions of packages that are the same on every node, by their names."""
    return {"the torch build": torch.__version__, "quorate": _package_hash()}


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Return the first differing fact of a node: name, got, expected; None: all are the same."""
    for name, expected in here.items():
        if (got := there.get(name)) != expected:
            return f"{name}: got {got}, expected {expected} as where the run was started"
    return None


@cache
def _package_hash() -> str:
    return _hash(sorted(_PACKAGE.rglob("*.py")))


def _hash(files: list[Path]) -> str:
    """Return a short hash of the text of files, in their order."""
    found = hashlib.sha256()
    for file in files:
        if not file.exists():
            return "not there"
        if file.is_file():  # a folder is a program too
            found.update(file.read_bytes())
    return found.hexdigest()[:12]
