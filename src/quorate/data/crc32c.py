"""CRC-32C checksums of token files, TFRecord files and stream indexes, from google-crc32c.

The package is in the extra ``data``, and is imported at the first checksum.
"""

from __future__ import annotations

from typing import Any

from quorate.errors import PackageError


def __getattr__(name: str) -> Any:
    """Return google-crc32c's function ``extend`` or ``value``, and cache it in this module.

    Raises:
        PackageError: google-crc32c is not installed.
    """
    if name not in ("extend", "value"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import google_crc32c
    except ImportError:
        purpose = "token files, TFRecord files and indexes of streams"
        raise PackageError("google-crc32c", "data", purpose) from None
    function = globals()[name] = getattr(google_crc32c, name)
    return function
