"""Data sets: reading their files, and getting those files once, verified and cached."""

from quorate.data.fetch import File, fetch
from quorate.data.idx import read_idx

__all__ = ["File", "fetch", "read_idx"]
