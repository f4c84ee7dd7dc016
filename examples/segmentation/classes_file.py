"""A file of classes: what the numbers, or the colours, of a folder's masks mean.

A line for each class, NAME,ID or NAME,R,G,B or NAME,ID,R,G,B, under a header or none. Pixels of a
class that is called "ignored" count for nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from legend import IGNORED, MOST_CLASSES, Legend, distinct

from quorate.errors import DataError

NOTHING = "ignored"  # in place of a class's name
_FORMS = "NAME,ID or NAME,R,G,B or NAME,ID,R,G,B"


class Key(NamedTuple):
    """What a mask says, and of which class it is; ``IGNORED`` for none."""

    legend: Legend
    ids: Mapping[int, int]  # number in a mask -> class; empty: masks are read by colour
    colours: Mapping[int, int]  # 65536 red + 256 green + blue -> class; empty: by number


def read(path: Path, side: int) -> Key:
    """The classes of a file, in its order.

    Args:
        path: of the file.
        side: of tiles, for the legend.

    Raises:
        DataError: a line is no class, or a name, a number or a colour comes twice.
    """
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(path, got=f"{error}", expected="a file of classes") from error
    lines = [(number, [word.strip() for word in row]) for number, row in enumerate(rows, 1) if row]
    if lines and not any(word.isdigit() for word in lines[0][1][1:]):
        del lines[0]  # a header
    names: list[str] = []
    drawn: list[tuple[int, int, int] | None] = []
    ids: dict[int, int] = {}
    colours: dict[int, int] = {}
    for line, (name, *words) in lines:
        where = f"{path}, line {line}"
        if not name or len(words) not in (1, 3, 4) or not all(map(str.isdigit, words)):
            raise DataError(where, got=",".join([name, *words]), expected=_FORMS)
        numbers = [int(word) for word in words]
        colour = tuple(numbers[-3:]) if len(numbers) > 1 else None
        if colour is not None and max(colour) > 255:
            raise DataError(where, got=f"colour {colour}", expected="numbers from 0 to 255")
        number = IGNORED if name == NOTHING else len(names)
        if name in names:
            raise DataError(where, got=f"{name} again", expected="each class once")
        if number != IGNORED:
            names.append(name)
            drawn.append(colour)  # type: ignore[arg-type]
        if len(numbers) != 3 and ids.setdefault(numbers[0], number) != number:
            raise DataError(where, got=f"number {numbers[0]} again", expected="each once")
        if colour is not None:
            red, green, blue = colour
            code = red << 16 | green << 8 | blue
            if colours.setdefault(code, number) != number:
                raise DataError(where, got=f"colour {colour} again", expected="each once")
    if not 2 <= len(names) <= MOST_CLASSES:
        raise DataError(path, got=f"{len(names)} classes", expected=f"2 to {MOST_CLASSES}")
    count = sum(1 for _, row in lines if row[0] != NOTHING)
    for kind, table in (("a number", ids), ("a colour", colours)):
        if table and sum(value != IGNORED for value in table.values()) < count:
            expected = f"{kind} for each class, as some have one"
            raise DataError(path, got="lines of several forms", expected=expected)
    spare = distinct(len(names))
    shown = tuple(c if c is not None else s for c, s in zip(drawn, spare, strict=True))
    return Key(Legend(tuple(names), shown, side), ids, colours)
