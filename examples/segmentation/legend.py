"""What the numbers of a mask mean: the names of classes, and the colours that they are drawn in.

A run keeps its own, beside its checkpoints, so that whoever has the run can draw what it says.
"""

from __future__ import annotations

import colorsys
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quorate.errors import DataError

Colour = tuple[int, int, int]  # red, green, blue, 0 to 255

IGNORED = 255  # the class of a pixel that counts for nothing
MOST_CLASSES = 128
FILE = "legend.json"


@dataclass(frozen=True)
class Legend:
    """The classes of a task, in the order of their numbers from 0.

    Args:
        names: each once.
        colours: of each.
        side: pixels of a tile that the network was trained on.
    """

    names: tuple[str, ...]
    colours: tuple[Colour, ...]
    side: int = 256

    def __len__(self) -> int:
        return len(self.names)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of classes as they stand in those of metrics."""
        return tuple("_".join(name.split()) for name in self.names)

    @property
    def palette(self) -> NDArray[np.uint8]:
        """The colours, (K, 3)."""
        return np.array(self.colours, np.uint8)

    def save(self, run_dir: Path) -> None:
        """Write it where ``of_run`` looks for it."""
        run_dir.mkdir(parents=True, exist_ok=True)
        classes = [{"name": n, "colour": c} for n, c in zip(self.names, self.colours, strict=True)]
        text = json.dumps({"side": self.side, "classes": classes}, indent=1, ensure_ascii=False)
        (run_dir / FILE).write_text(text + "\n")


def of_run(run_dir: Path, many: int) -> Legend:
    """The legend of a run; without its file the classes are numbered.

    Args:
        run_dir: of the run.
        many: classes of its network.

    Raises:
        DataError: the file is no legend, or has another number of classes.
    """
    path = run_dir / FILE
    if not path.exists():
        return numbered(range(many))
    try:
        read = json.loads(path.read_text())
        found = Legend(
            tuple(str(each["name"]) for each in read["classes"]),
            tuple((int(r), int(g), int(b)) for r, g, b in (e["colour"] for e in read["classes"])),
            int(read["side"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise DataError(path, got=got, expected="the legend of a run") from error
    if len(found) != many:
        got, expected = f"{len(found)} classes", f"{many}, as the network of the run has"
        raise DataError(path, got=got, expected=expected)
    return found


def numbered(numbers: Sequence[int], side: int = 256) -> Legend:
    """A legend of classes that have numbers and no names."""
    return Legend(tuple(f"class {n}" for n in numbers), distinct(len(numbers)), side)


def distinct(many: int) -> tuple[Colour, ...]:
    """So many colours, of hues as far from each other as can be, in two brightnesses."""

    def colour(number: int) -> Colour:
        value = 0.95 if number % 2 == 0 else 0.65
        red, green, blue = colorsys.hsv_to_rgb(number / max(1, many), 0.8, value)
        return round(255 * red), round(255 * green), round(255 * blue)

    return tuple(colour(number) for number in range(many))
