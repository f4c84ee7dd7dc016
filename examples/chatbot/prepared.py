"""Pairs as numbers, kept in the cache: files that all processes of a machine map into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vocabulary import Vocabulary
from whole import write_whole

from quorate.data.tokens import Tokens, write_tokens
from quorate.errors import DataError

VOCABULARY, CONTENTS = "vocabulary.txt", "contents.json"


class Made(NamedTuple):
    """What is kept."""

    vocabulary: Vocabulary
    parts: Mapping[str, Iterable[Any]]  # name -> rows, as ``write_tokens`` takes them
    counts: Sequence[int]  # numbers to keep beside them


class Prepared(NamedTuple):
    """What was kept."""

    vocabulary: Vocabulary
    parts: dict[str, Tokens]
    counts: list[int]


def prepared(
    folder: Path,
    name: str,
    made_from: Sequence[str],
    make: Callable[[], Made],
    say: Callable[[str], None] = print,
) -> Prepared:
    """What ``make`` returns, from the cache if it is there.

    ``contents.json`` is written last, with the SHA-256 of each file beside it. Files that are
    others, or damaged, are made again. Several processes may do so at once: they write the same.

    Args:
        folder: the cache.
        name: of the data set.
        made_from: all that the result depends on.
        make: makes it.
        say: gets a line if something was damaged.

    Raises:
        DataError: the cache cannot be written.
    """
    key = hashlib.sha256("\n".join(made_from).encode()).hexdigest()
    place = folder / f"{name}-{key[:16]}"
    try:
        if (place / CONTENTS).exists():
            if (found := _kept(place)) is not None:
                return found
            say(f"{place} is damaged: making it again")
        made = make()
        place.mkdir(parents=True, exist_ok=True)
        made.vocabulary.save(place / VOCABULARY)
        for part, rows in made.parts.items():
            write_tokens(place / f"{part}.tokens", rows)
        names = [VOCABULARY, *(f"{part}.tokens" for part in made.parts)]
        sums = {name: _sha256(place / name) for name in names}
        write_whole(place / CONTENTS, json.dumps({"counts": [*made.counts], "sha256": sums}))
    except OSError as error:
        raise DataError(
            folder,
            got=error,
            expected="a folder to cache data in",
            fix="QUORATE_DATA can name another",
        ) from error
    found = _kept(place)
    if found is None:
        raise DataError(place, got="other files than were written", expected="a sound disk")
    return found


def _kept(place: Path) -> Prepared | None:
    """What is in the folder; None if it is damaged."""
    try:
        contents = json.loads((place / CONTENTS).read_text())
        sums, counts = contents["sha256"], contents["counts"]
        if any(_sha256(place / name) != expected for name, expected in sums.items()):
            return None
        parts = [name for name in sums if name != VOCABULARY]
        return Prepared(
            Vocabulary.load(place / VOCABULARY),
            {name.removesuffix(".tokens"): Tokens(place / name) for name in parts},
            counts,
        )
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
