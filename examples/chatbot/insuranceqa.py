"""InsuranceQA: 27,987 pairs about insurance, in English and, translated by machine, in Chinese.

Minwei Feng et al., "Applying Deep Learning to Answer Selection", 2015; Chinese by Hai Liang Wang,
2017. Its terms are GPL-3.0 and research use, so it is fetched only for those who ask for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for open_data

from open_data.fetch import fetch
from open_data.sources import File
from open_data.sources.python_package import PythonPackage
from pairs import Pair

from quorate.data import cache_dir

FILES = (
    File("answers.json", "cb3a17a37e0727f82aa232d73d5e8b948329a9ecf1405dc067314b7251de5cbd"),
    File("train.json", "fbdc27a82e87808a426ad8a5077864ee3f9f3e91462fbbc1f6c0de8ab8396fd8"),
    File("valid.json", "558fe9ba0c407d27acf12b01bf1c54acd6b16e2e79f1a8cbf884d47ea4db78fb"),
    File("test.json", "4453351f33f29e3c87ed649cb24937eae51b3ea03b3a72c5bf4e2a0ab30dd066"),
)

CONTENT = " ".join(file.sha256 for file in FILES)

SOURCES = (
    PythonPackage(
        "insuranceqa_data==1.1",  # later ones hold no data
        {f.name: f"insuranceqa_data-1.1/insuranceqa_data/{f.name}.gz" for f in FILES},
    ),
)


def load(language: str, say: Callable[[str], None] = print) -> list[Pair]:
    """All pairs, in the order of the files.

    Raises:
        DataError: they cannot be fetched.
    """
    place = fetch(
        "InsuranceQA",
        FILES,
        SOURCES,
        cache=cache_dir() / "insuranceqa",
        licence="GPL-3.0, for research",
        hint=f"into {cache_dir() / 'insuranceqa'}",
        say=say,
    )
    answers, *parts = (json.loads((place / file.name).read_bytes()) for file in FILES)
    return [
        Pair(question[language], answers[number][language])
        for part in parts
        for question in part.values()
        for number in question["answers"]
    ]
