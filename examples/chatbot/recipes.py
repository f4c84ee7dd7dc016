"""What each data set is trained with if nothing else is said, and what it has to reach.

A flag of ``options.py`` goes before a recipe's number. A file of pairs has the numbers of
InsuranceQA, and easier targets; of several data sets the recipe of the first one counts.
"""

from __future__ import annotations

from typing import Any

# Names of the targets, see ``target.py``: the most of the first two, the least of the third.
UNIGRAM, OTHERS, RECALLED = "unigram", "others", "recalled"

# A target leaves about a tenth to the worst of the runs that the table in README.md has.

_INSURANCE: dict[str, Any] = {
    "vocabulary": 5000,
    "spell": 0.1,
    "units": 192,
    "layers": 2,
    "dropout": 0.4,
    "epochs": 6,
    "batch_size": 64,
    "lr": 4e-3,
    "targets": {UNIGRAM: 0.11, OTHERS: 0.6},
}

# Two-part sayings make sense, not words, of their first part: the second can hardly be guessed,
# unless a saying like it was learnt, and it is like it in its characters.
_RIDDLES: dict[str, Any] = {
    **_INSURANCE,
    "spell": 0.2,
    "layers": 1,
    "dropout": 0.3,
    "epochs": 16,
    "targets": {UNIGRAM: 0.15, OTHERS: 0.83},
}

# Small talk is learnt by heart: there are too few pairs to say anything of other questions by them.
_SMALL_TALK: dict[str, Any] = {
    **_INSURANCE,
    "vocabulary": 3000,
    "units": 96,
    "layers": 1,
    "dropout": 0.2,
    "epochs": 40,
    "batch_size": 32,
    "targets": {RECALLED: 0.84},
}

# Nearly every one of its answers is another one.
_CHATTERBOT: dict[str, Any] = {
    **_SMALL_TALK,
    "units": 128,
    "dropout": 0.1,
    "epochs": 50,
    "targets": {RECALLED: 0.87},
}

_OWN: dict[str, Any] = {**_INSURANCE, "targets": {UNIGRAM: 0.25, OTHERS: 0.9}}

RECIPES = {
    "insuranceqa": _INSURANCE,
    "riddles": _RIDDLES,
    "chatterbot": _CHATTERBOT,
    "small_talk": _SMALL_TALK,
}

LEAST_ANSWER = {"chatterbot": 1, "small_talk": 1, "riddles": 1}  # words; 3 of all others


def recipe(source: str) -> dict[str, Any]:
    """The numbers for a data set, by the names of the flags."""
    return RECIPES.get(source, _OWN)
