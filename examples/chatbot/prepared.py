"""Pairs as words, kept in the cache: cutting 28,000 Chinese pairs takes ten seconds of a core."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pairs import Tokens
from whole import write_whole

from quorate.errors import DataError


def prepared(
    folder: Path,
    name: str,
    parts: Sequence[str],
    make: Callable[[], list[Tokens]],
    say: Callable[[str], None] = print,
) -> list[Tokens]:
    """What ``make`` returns, from the cache if it is there.

    A file there begins with the SHA-256 of the rest of it; one that is damaged is made again.

    Args:
        folder: the cache.
        name: of the data set.
        parts: all that the result depends on.
        make: makes it.
        say: gets a line if a file was damaged.

    Raises:
        DataError: the cache cannot be written.
    """
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    path = folder / f"{name}-{key[:16]}.tsv"
    try:
        if path.exists():
            checksum, _, kept = path.read_bytes().partition(b"\n")
            if hashlib.sha256(kept).hexdigest().encode() == checksum:
                return [_tokens(line) for line in kept.decode().split("\n")[:-1]]
            say(f"{path} is damaged: making it again")
        found = make()
        content = "".join(f"{' '.join(q)}\t{' '.join(a)}\n" for q, a in found)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}")
    except OSError as error:
        raise DataError(
            folder,
            got=error,
            expected="a folder to cache data in",
            fix="QUORATE_DATA can name another",
        ) from error
    return found


def _tokens(line: str) -> Tokens:
    question, answer = line.split("\t")
    return Tokens(question.split(" "), answer.split(" "))
