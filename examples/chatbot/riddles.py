"""Two-part sayings: 17,136 in Chinese. The first part is a riddle, the second says what it means.

From jionlp (Apache-2.0).
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for open_data

from open_data.fetch import fetch
from open_data.sources import File
from open_data.sources.python_package import PythonPackage
from pairs import Pair

from quorate.data import cache_dir
from quorate.errors import SettingError

FILES = (File("xiehouyu.zip", "65de9fbbd4565c42c8738be002ee8573d2a7c7f5723f65320ccf3a03a67921e2"),)

CONTENT = " ".join(file.sha256 for file in FILES)

SOURCES = (PythonPackage("jionlp==1.5.31", {"xiehouyu.zip": "jionlp/dictionary/xiehouyu.zip"}),)


def load(language: str, say: Callable[[str], None] = print) -> list[Pair]:
    """All pairs, in the order of the file.

    Raises:
        DataError: they cannot be fetched.
        SettingError: they are wanted in English.
    """
    if language != "zh":
        raise SettingError("language", language, "zh: these are Chinese", "pass --language zh")
    place = fetch(
        "Two-part sayings",
        FILES,
        SOURCES,
        cache=cache_dir() / "riddles",
        licence="Apache-2.0",
        hint=f"into {cache_dir() / 'riddles'}",
        say=say,
    )
    with zipfile.ZipFile(place / "xiehouyu.zip") as archive:
        lines = archive.read("xiehouyu.txt").decode().splitlines()
    return [Pair(*line.split("\t")[:2]) for line in lines if "\t" in line]
