"""The data of a run: pairs as numbers in files that are mapped, split by question, and padded.

Legend: R rows, B rows of a batch, T pieces of the longest question, U of the longest answer with
its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import chatterbot
import insuranceqa
import numpy as np
import riddles
import small_talk
import torch
from numpy.typing import NDArray
from pairs import MOST_ANSWER, MOST_QUESTION, MOST_QUESTIONS, Pair, read_pairs, tokenized
from pairs import Tokens as Words
from prepared import Made, prepared
from torch.utils.data import Dataset
from vocabulary import BEGIN, END, PAD, Vocabulary
from words import cutter, text

import quorate
from quorate.data import cache_dir
from quorate.data.tokens import Tokens
from quorate.errors import DataError, SettingError, nearest

SOURCES: dict[str, ModuleType] = {
    "insuranceqa": insuranceqa,
    "chatterbot": chatterbot,
    "riddles": riddles,
    "small_talk": small_talk,
}

HELD_OUT = {"test": range(0, 5), "validation": range(5, 10)}  # per cent of the questions

_FORMAT = "3"  # of what is cached: count it up when the same pairs make other numbers

Indices = NDArray[np.int64]


class Row(NamedTuple):
    """A pair as numbers."""

    question: torch.Tensor  # (T,) int32
    letters: torch.Tensor  # (T',) int32, the question spelt
    answer: torch.Tensor  # (1 + U,) int32: BEGIN, pieces, END


class Batch(NamedTuple):
    """Rows, padded on the right with ``PAD``."""

    questions: torch.Tensor  # (B, T) int64
    letters: torch.Tensor  # (B, T') int64
    answers: torch.Tensor  # (B, 1 + U) int64: BEGIN, pieces, END


class Pairs(Dataset[Row]):
    """Pairs as numbers: rows of a file that is mapped, never read as a whole.

    Args:
        tokens: the file: question, letters and answer of each row.
        answers: which rows of the file the answers are of, (R,).
        questions: likewise. Default: the same.
    """

    def __init__(self, tokens: Tokens, answers: Indices, questions: Indices | None = None) -> None:
        self._tokens = tokens
        self._answers = answers
        self._questions = answers if questions is None else questions

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(row)  # which ends a loop over them
        asked, said = int(self._questions[row]), int(self._answers[row])
        question, letters, answer = self._tokens[asked]
        return Row(question, letters, answer if said == asked else self._tokens[said][2])

    @property
    def lengths(self) -> Indices:
        """Pieces of the answers, (R,). Questions are packed: their padding costs nothing."""
        return self._tokens.lengths(2)[self._answers]

    def by_length(self) -> Pairs:
        """The same rows, the short ones first: less padding where order means nothing."""
        order = np.argsort(self.lengths, kind="stable")
        return Pairs(self._tokens, self._answers[order], self._questions[order])

    def with_other_questions(self) -> Pairs:
        """The same answers, each to a question that it was not given to.

        Rows are put in the order of their questions; each gets that of the row half of them away.
        """
        asked = [self._tokens[int(row)][0].tolist() for row in self._questions]
        order = np.array(sorted(range(len(asked)), key=asked.__getitem__), dtype=np.int64)
        others = np.roll(self._questions[order], len(order) // 2)
        return Pairs(self._tokens, self._answers[order], others).by_length()

    def each_question(self) -> list[tuple[list[int], list[list[int]]]]:
        """Each question once, with all answers that it has here, without their begin and end."""
        found: dict[tuple[int, ...], list[list[int]]] = {}
        for row in self:
            found.setdefault(tuple(row.question.tolist()), []).append(row.answer[1:-1].tolist())
        return [([*question], answers) for question, answers in found.items()]


class Data(NamedTuple):
    """All that a run is given."""

    train: Pairs
    validation: Pairs  # both sorted by length
    test: Pairs
    vocabulary: Vocabulary
    language: str
    questions: list[str]  # of the test set, each once


def load(
    sources: Sequence[str],
    language: str,
    *,
    vocabulary_size: int,
    least_answer: Sequence[int],
    times: Sequence[int] = (),
    skip_bad: bool = False,
    say: Callable[[str], None] = print,
) -> Data:
    """Fetch, cut into words, split, and number.

    Args:
        sources: names of data sets, or paths of files of pairs.
        language: "zh" or "en".
        vocabulary_size: at most so many pieces, see ``Vocabulary.of``.
        least_answer: of each source, see ``tokenized``.
        times: how often an epoch has the training pairs of each source. Default: once.
        skip_bad: see ``read_pairs``.
        say: gets lines about what was fetched and left out.

    Raises:
        UserError: something is not there, or not as it should be.
    """
    times = times or [1] * len(sources)
    if len(times) != len(sources):
        raise SettingError("times", len(times), f"{len(sources)}: one for each of --data", "say so")
    own = {}
    for source in sources:
        if source in SOURCES:
            continue
        near = nearest(source, SOURCES)
        if near is not None and not Path(source).exists():
            expected = f"a file of pairs, or one of {', '.join(SOURCES)}"
            raise SettingError("data", source, expected, f"did you mean {near}?")
        own[source] = read_pairs(Path(source), skip_bad=skip_bad, say=say)

    def pairs_of(source: str) -> list[Pair]:
        return own[source] if source in own else SOURCES[source].load(language, say)

    def make() -> Made:
        parts: dict[str, list[Words]] = {"train": [], "validation": [], "test": []}
        counts = []
        for source, least in zip(sources, least_answer, strict=True):
            texts = pairs_of(source)
            say(f"{source}: cutting {len(texts):,} pairs into words; later runs find them cached")
            pairs = tokenized(texts, language, say, least_answer=least)
            if not pairs:
                got, fix = f"{len(texts):,} pairs, of which none is kept", "see the line above"
                if least > 1:
                    fix += "; --least-answer 1 keeps short answers"
                raise DataError(source, got=got, expected="pairs to learn from", fix=fix)
            found = split(pairs)
            counts.append(len(found["train"]))
            for name, some in found.items():
                parts[name] += some
        for name, some in parts.items():
            if not some:
                got = f"no question for the {name} set"
                raise DataError(", ".join(sources), got=got, expected="some", fix="give more pairs")
        vocabulary = Vocabulary.of(
            (part for pair in parts["train"] for part in pair), vocabulary_size
        )
        rows = {name: [_numbers(pair, vocabulary) for pair in some] for name, some in parts.items()}
        return Made(vocabulary, rows, counts)

    content = [
        part
        for source in sources
        for part in (
            [field for pair in own[source] for field in pair]
            if source in own
            else [SOURCES[source].CONTENT]
        )
    ]
    limits = f"{MOST_QUESTION} {[*least_answer]} {MOST_ANSWER} {MOST_QUESTIONS} {vocabulary_size}"
    found = prepared(
        cache_dir() / "chatbot",
        "-".join([*("own" if source in own else source for source in sources), language]),
        [_FORMAT, language, cutter(language), limits, *sources, *content],
        make,
        say,
    )
    each = np.repeat(times, found.counts)  # of each row how often
    train, validation, test = (
        Pairs(tokens, np.arange(len(tokens))) for tokens in (found.parts[name] for name in PARTS)
    )
    train = Pairs(found.parts["train"], np.repeat(np.arange(len(train)), each))
    questions = [
        text(found.vocabulary.words(question), language) for question, _ in test.each_question()
    ]
    return Data(
        train, validation.by_length(), test.by_length(), found.vocabulary, language, questions
    )


PARTS = ("train", "validation", "test")


def part_of(question: Sequence[str]) -> str:
    """Whether a question, as words, is of the training, the validation or the test set.

    It is a function of the question alone, of its letters and digits: the same question with
    another mark of punctuation is the same question.
    """
    bare = "".join(c for word in question for c in word if c.isalnum())
    share = int.from_bytes(hashlib.sha256(bare.encode()).digest()[:4], "big") % 100
    return next((name for name, held in HELD_OUT.items() if share in held), "train")


def split(pairs: Sequence[Words]) -> dict[str, list[Words]]:
    """Training, validation and test set: all answers to a question are in one of them."""
    parts: dict[str, list[Words]] = {name: [] for name in PARTS}
    for pair in pairs:
        parts[part_of(pair.question)].append(pair)
    return parts


def collate(rows: Sequence[Row]) -> Batch:
    """Pad rows to the longest of them."""
    return Batch(
        padded([row.question for row in rows]),
        padded([row.letters for row in rows]),
        padded([row.answer for row in rows]),
    )


class Spelt:
    """The ``augment`` of a Trainer: some questions are read letter by letter.

    So that the pieces that spell words are learnt: else nobody writes most of them.

    Args:
        share: of the questions.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, batch: Batch, draws: quorate.Draws) -> Batch:
        """The batch, where some rows of its questions are their letters."""
        is_spelt = draws.coins(self._share)  # (B, 1)
        if not is_spelt.any():
            return batch
        most = max(batch.letters.shape[1], batch.questions.shape[1])
        letters, questions = (
            torch.nn.functional.pad(part, (0, most - part.shape[1]), value=PAD)
            for part in (batch.letters, batch.questions)
        )
        return batch._replace(questions=torch.where(is_spelt, letters, questions))


def padded(rows: Sequence[Sequence[int] | torch.Tensor], least: int = 0) -> torch.Tensor:
    """Numbers, (B, longest or ``least``) int64."""
    found = torch.full((len(rows), max(least, *map(len, rows))), PAD)
    for place, row in enumerate(rows):
        found[place, : len(row)] = torch.as_tensor(row)
    return found


def _numbers(pair: Words, vocabulary: Vocabulary) -> tuple[list[int], list[int], list[int]]:
    return (
        vocabulary.numbers(pair.question),
        vocabulary.letters(pair.question),
        [BEGIN, *vocabulary.numbers(pair.answer), END],
    )
