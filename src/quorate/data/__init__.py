"""Data sets: reading their files; where a copy of them is kept."""

from quorate.machine.environment import cache_dir

__all__ = ["cache_dir"]
