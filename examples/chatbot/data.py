"""The data of a run: pairs as numbers, split by question, and padded to a batch.

Legend: B rows, T words of the longest question, U of the longest answer with its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import chatterbot
import insuranceqa
import numpy as np
import riddles
import torch
from pairs import (
    LEAST_ANSWER,
    MOST_ANSWER,
    MOST_QUESTION,
    MOST_QUESTIONS,
    Tokens,
    read_pairs,
    tokenized,
)
from prepared import prepared
from torch.utils.data import Dataset
from vocabulary import BEGIN, END, PAD, Vocabulary
from words import cutter, text

from quorate.data import cache_dir

SOURCES = {"insuranceqa": insuranceqa, "chatterbot": chatterbot, "riddles": riddles}

HELD_OUT = {"test": range(0, 5), "validation": range(5, 10)}  # per cent of the questions


class Row(NamedTuple):
    """A pair as numbers."""

    question: list[int]
    answer: list[int]
    reference: str  # the answer as text, with the words that have no number


class Batch(NamedTuple):
    """Rows, padded on the right with ``PAD``."""

    questions: torch.Tensor  # (B, T) int64
    answers: torch.Tensor  # (B, 1 + U) int64: BEGIN, words, END
    references: tuple[str, ...]  # B


class Pairs(Dataset[Row]):
    """Pairs as numbers.

    Args:
        tokens: the pairs as words.
        vocabulary: gives words their numbers.
        language: of both.
    """

    def __init__(self, tokens: Sequence[Tokens], vocabulary: Vocabulary, language: str) -> None:
        self._rows = [
            Row(
                vocabulary.numbers(question),
                [BEGIN, *vocabulary.numbers(answer), END],
                text(answer, language),
            )
            for question, answer in tokens
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    @property
    def lengths(self) -> np.ndarray:
        """Words of the answers, (R,) int64. Questions are packed: their padding costs nothing."""
        return np.array([len(row.answer) for row in self._rows])

    def by_length(self) -> Pairs:
        """The same rows, the short ones first: less padding where order means nothing."""
        return self._with([self._rows[row] for row in np.argsort(self.lengths, kind="stable")])

    def with_other_questions(self) -> Pairs:
        """The same answers, each to a question that it was not given to.

        Rows are put in the order of their questions; each gets that of the row half of them away.
        """
        rows = sorted(self._rows, key=lambda row: row.question)
        half = len(rows) // 2
        return self._with(
            [row._replace(question=rows[i - half].question) for i, row in enumerate(rows)]
        ).by_length()

    def _with(self, rows: list[Row]) -> Pairs:
        other = Pairs([], Vocabulary(()), "")
        other._rows = rows
        return other


class Data(NamedTuple):
    """All that a run is given."""

    train: Pairs
    validation: Pairs  # both sorted by length
    test: Pairs
    vocabulary: Vocabulary
    language: str
    questions: list[str]  # of the test set, each once


def load(
    source: str,
    language: str,
    *,
    vocabulary_size: int,
    least_answer: int = LEAST_ANSWER,
    skip_bad: bool = False,
    say: Callable[[str], None] = print,
) -> Data:
    """Fetch, cut into words, split, and number.

    Args:
        source: a data set's name, or the path of a file of pairs.
        language: "zh" or "en".
        vocabulary_size: at most so many words, the most frequent ones of the training set.
        least_answer: see ``tokenized``.
        skip_bad: see ``read_pairs``.
        say: gets lines about what was fetched and left out.

    Raises:
        UserError: something is not there, or not as it should be.
    """
    tokens = _tokens(source, language, least_answer, skip_bad, say)
    parts = split(tokens)
    vocabulary = Vocabulary.of((part for pair in parts["train"] for part in pair), vocabulary_size)
    train, validation, test = (
        Pairs(parts[name], vocabulary, language) for name in ("train", "validation", "test")
    )
    questions = list(dict.fromkeys(text(q, language) for q, _ in parts["test"]))
    return Data(train, validation.by_length(), test.by_length(), vocabulary, language, questions)


def split(tokens: Sequence[Tokens]) -> dict[str, list[Tokens]]:
    """Training, validation and test set: all answers to a question are in one of them.

    In which is a function of the question alone, of its letters and digits: the same question with
    another mark of punctuation is the same question.
    """
    parts: dict[str, list[Tokens]] = {"train": [], "validation": [], "test": []}
    for pair in tokens:
        bare = "".join(c for word in pair.question for c in word if c.isalnum())
        share = int.from_bytes(hashlib.sha256(bare.encode()).digest()[:4], "big") % 100
        name = next((name for name, held in HELD_OUT.items() if share in held), "train")
        parts[name].append(pair)
    return parts


def collate(rows: Sequence[Row]) -> Batch:
    """Pad rows to the longest of them."""
    return Batch(
        padded([row.question for row in rows]),
        padded([row.answer for row in rows]),
        tuple(row.reference for row in rows),
    )


def padded(rows: Sequence[Sequence[int]], least: int = 0) -> torch.Tensor:
    """Numbers, (B, longest or ``least``) int64."""
    found = torch.full((len(rows), max(least, *map(len, rows))), PAD)
    for place, row in enumerate(rows):
        found[place, : len(row)] = torch.tensor(row)
    return found


def _tokens(
    source: str,
    language: str,
    least_answer: int,
    skip_bad: bool,
    say: Callable[[str], None],
) -> list[Tokens]:
    found = SOURCES.get(source)
    if found is None:
        pairs = read_pairs(Path(source), skip_bad=skip_bad, say=say)
        name, content = "own", [field for pair in pairs for field in pair]
    else:
        name, content = source, [found.CONTENT]

    def make() -> list[Tokens]:
        texts = pairs if found is None else found.load(language, say)
        return tokenized(texts, language, say, least_answer=least_answer)

    limits = f"{MOST_QUESTION} {least_answer} {MOST_ANSWER} {MOST_QUESTIONS}"
    return prepared(
        cache_dir() / "chatbot",
        f"{name}-{language}",
        [language, cutter(language), limits, *content],
        make,
        say,
    )
