"""Data sets: file formats, the cache of downloaded data, and the position of rows in the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quorate.machine.environment import cache_dir

if TYPE_CHECKING:
    from quorate.replica.beside.at import at

__all__ = ["at", "cache_dir"]


def __getattr__(name: str) -> Any:
    # Imported on access: data set files can then be read in an installation without torch.
    if name == "at":
        from quorate.replica.beside.at import at

        return at
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
