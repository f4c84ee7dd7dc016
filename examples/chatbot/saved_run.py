"""What a run directory has beside checkpoints: the vocabulary, what the network is like, and the
questions of the test set, to ask it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from data import Data
from model import Seq2Seq
from vocabulary import Vocabulary
from whole import write_whole

from quorate import load_weights
from quorate.errors import DataError

VOCABULARY, NETWORK, QUESTIONS = "vocabulary.txt", "network.json", "held_out.txt"
WEIGHTS = "model.safetensors"


class SavedRun(NamedTuple):
    """A run that can answer."""

    model: Seq2Seq
    vocabulary: Vocabulary
    language: str
    no_repeat: int


def save(run_dir: Path, data: Data, network: dict[str, Any], no_repeat: int) -> None:
    """Write all three, or see that the vocabulary is what is there.

    Args:
        run_dir: it is made if it is not there.
        data: of the run.
        network: arguments of ``Seq2Seq``.
        no_repeat: see ``greedy``.

    Raises:
        DataError: the run that is there has another vocabulary.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    place = run_dir / VOCABULARY
    if place.exists() and Vocabulary.load(place) != data.vocabulary:
        raise DataError(
            place,
            got="the vocabulary of other pairs",
            expected="that of this run",
            fix="choose another run directory, or pass --fresh",
        )
    data.vocabulary.save(place)
    lines = "".join(f"{question}\n" for question in data.questions)
    write_whole(run_dir / QUESTIONS, lines)
    found = {"language": data.language, "no_repeat": no_repeat, **network}
    write_whole(run_dir / NETWORK, json.dumps(found, indent=1))


def load(run_dir: Path) -> SavedRun:
    """The network with the newest weights, in evaluation mode.

    Raises:
        UserError: something is not there, or damaged.
    """
    place = run_dir / NETWORK
    try:
        network = json.loads(place.read_text())
        language, no_repeat = network.pop("language"), network.pop("no_repeat")
        model = Seq2Seq(**network)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            place,
            got=f"{type(error).__name__}: {error}",
            expected="what train.py wrote",
            fix="name the directory of a run",
        ) from error
    weights = run_dir / WEIGHTS  # of single.py
    load_weights(model, weights if weights.exists() else run_dir, print)
    vocabulary = Vocabulary.load(run_dir / VOCABULARY)
    return SavedRun(model.eval(), vocabulary, language, no_repeat)


def questions(run_dir: Path) -> list[str]:
    """The questions of the test set.

    Raises:
        DataError: they are not there.
    """
    place = run_dir / QUESTIONS
    try:
        return place.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(place, got=error, expected="what train.py wrote") from error
