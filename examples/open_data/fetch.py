"""Getting a data set's files once: from the first source that works, verified, into a cache.

A source only puts files into a temporary directory. What they must be is said by their SHA-256,
so every source is held to the same content, and nothing unverified ever has its final name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from open_data.sources import File, Source, one_line

from quorate.errors import DataError


def fetch(
    title: str,
    files: Sequence[File],
    sources: Sequence[Source],
    *,
    cache: Path,
    licence: str,
    hint: str,
    say: Callable[[str], None] = print,
) -> Path:
    """Make sure that the cache holds all files, and return it.

    Cached files are hashed on every call; missing and damaged ones are fetched. Several processes
    may do so at once: each works in a directory of its own and renames what it has verified.

    Args:
        title: The data set, in messages.
        files: What is needed.
        sources: Where to get it, in the order to try.
        cache: The directory to keep it in; it and its parents are made.
        licence: Of the data, said when they are fetched.
        hint: What the user can do with files got by hand: it completes "put NAMES ...".
        say: Gets one line for a damaged cached file, and one for what was fetched.

    Raises:
        DataError: no source works (with every source's reason), or the cache cannot be written.
    """
    try:
        wanted = _missing(title, files, cache, say)
        if not wanted:
            return cache
        cache.mkdir(parents=True, exist_ok=True)
        reasons = []
        for source in sources:
            # Beside the cache: on one file system, so that a rename is atomic.
            with TemporaryDirectory(prefix=f".{cache.name}-", dir=cache.parent) as temporary:
                fresh = Path(temporary)
                reason = _attempt(source, wanted, fresh)
                if reason:
                    reasons.append(f"{source.title}: {reason}")
                    continue
                size = sum((fresh / file.name).stat().st_size for file in wanted)
                _keep(wanted, fresh, cache)
            count = f"{len(wanted)} file{'s' if len(wanted) > 1 else ''}"
            say(
                f"{title}: {count}, {size / 1e6:,.1f} MB, from {source.title}, "
                f"cached in {cache}; licence: {licence}"
            )
            return cache
    except OSError as error:
        raise DataError(
            cache,
            got=one_line(error),
            expected="a directory to cache data in",
            fix="QUORATE_DATA can name another",
        ) from error
    raise DataError(
        title,
        got=f"nothing from any source ({' | '.join(reasons)})",
        expected="one that works",
        fix=f"put {', '.join(file.name for file in files)} {hint}",
    )


def _missing(
    title: str, files: Sequence[File], cache: Path, say: Callable[[str], None]
) -> list[File]:
    """List the files that are not in the cache as they should be."""
    missing = []
    for file in files:
        try:
            got = _sha256(cache / file.name)
        except FileNotFoundError:
            missing.append(file)
            continue
        if got != file.sha256:
            say(f"{title}: {cache / file.name} is damaged (SHA-256 {got}): getting it again")
            missing.append(file)
    return missing


def _attempt(source: Source, files: Sequence[File], into: Path) -> str:
    """Let a source put files into a directory and verify them. Returns why it failed, or ""."""
    try:
        source.get(files, into)
        for file in files:
            got = _sha256(into / file.name)
            if got != file.sha256:
                return f"{file.name}: got SHA-256 {got}, expected {file.sha256}"
    except (OSError, DataError) as error:
        return one_line(error)
    return ""


def _keep(files: Sequence[File], fresh: Path, cache: Path) -> None:
    """Move verified files into the cache, each as a whole even if the power fails."""
    for file in files:
        with (fresh / file.name).open("rb") as content:
            os.fsync(content.fileno())
        os.replace(fresh / file.name, cache / file.name)


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
