"""Pairs of a question and an answer: a file of them, and which of them are learnt from.

A file has a pair per line: question, tab, answer, in UTF-8.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from words import first_sentence, question_words, words

from quorate.errors import DataError

MOST_QUESTION, LEAST_ANSWER, MOST_ANSWER = 20, 3, 30  # words
MOST_QUESTIONS = 10  # that have the same answer: "great question!" answers none of them
PROGRESS_S = 10.0  # between two lines about how many pairs were cut into words

FIX = "mend it, or pass --skip-bad to leave such lines out and have them counted"


class Pair(NamedTuple):
    """A pair as text."""

    question: str
    answer: str


class Tokens(NamedTuple):
    """A pair as words."""

    question: list[str]
    answer: list[str]


def read_pairs(
    path: Path, *, skip_bad: bool = False, say: Callable[[str], None] = print
) -> list[Pair]:
    """The pairs of a file.

    Args:
        path: of the file.
        skip_bad: leave out lines that are no pair, and say how many.
        say: gets that line.

    Raises:
        DataError: there is no such file, no pair in it, or a line that is none, with its number.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        got = error.strerror or str(error)
        raise DataError(path, got=got, expected="a file with a pair per line") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"":  # what follows the last line's end
        lines.pop()
    pairs: list[Pair] = []
    bad: Counter[str] = Counter()
    first_bad = ""
    for number, line in enumerate(lines, start=1):
        pair = _pair(line)
        if isinstance(pair, Pair):
            pairs.append(pair)
            continue
        if not skip_bad:
            where = f"{path}, line {number:,}"
            raise DataError(where, got=pair, expected="question, tab, answer", fix=FIX)
        first_bad = first_bad or f"line {number:,}: {pair}"
        bad[pair.partition(" at byte ")[0]] += 1
    if bad:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(bad.items()))
        say(f"{path}: {bad.total():,} of {len(lines):,} lines skipped: {kinds}; first {first_bad}")
    if not pairs:
        raise DataError(path, got="no pair", expected="a pair per line: question, tab, answer")
    return pairs


def _pair(line: bytes) -> Pair | str:
    """The pair of a line, or why it is none."""
    try:
        fields = [field.strip() for field in line.decode("utf-8").split("\t")]
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    if not any(fields):
        return "an empty line"
    if len(fields) != 2:
        return "no answer (no tab)" if len(fields) == 1 else f"{len(fields)} fields"
    if not fields[0]:
        return "no question"
    if not fields[1]:
        return "no answer"
    return Pair(*fields)


def tokenized(
    pairs: Iterable[Pair],
    language: str,
    say: Callable[[str], None] = print,
    *,
    least_answer: int = LEAST_ANSWER,
) -> list[Tokens]:
    """The pairs that are learnt from, as words: of an answer its first sentence.

    Left out, and counted: questions of no words or more than 20, answers of fewer than
    ``least_answer`` or more than 30, a pair that was there before, and answers that more than 10
    questions have. Every ten seconds a line says how many pairs were cut into words.
    """
    kept: dict[tuple[str, str], Tokens] = {}
    out: Counter[str] = Counter()
    said_at = time.monotonic()
    for number, pair in enumerate(pairs):
        if time.monotonic() - said_at >= PROGRESS_S:
            said_at = time.monotonic()
            say(f"{number:,} pairs are cut into words so far")
        question = question_words(pair.question, language)
        answer = words(first_sentence(pair.answer, language), language)
        key = (" ".join(question), " ".join(answer))
        if not question or not answer:
            out["with no word in question or answer"] += 1
        elif len(question) > MOST_QUESTION:
            out[f"with a question of more than {MOST_QUESTION} words"] += 1
        elif len(answer) < least_answer:
            out[f"with an answer of fewer than {least_answer} words"] += 1
        elif len(answer) > MOST_ANSWER:
            out[f"with an answer of more than {MOST_ANSWER} words"] += 1
        elif key in kept:
            out["there twice"] += 1
        else:
            kept[key] = Tokens(question, answer)
    questions = Counter(answer for _, answer in kept)
    found = [pair for (_, answer), pair in kept.items() if questions[answer] <= MOST_QUESTIONS]
    if common := len(kept) - len(found):
        out[f"with an answer that more than {MOST_QUESTIONS} questions have"] = common
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(out.items()))
    total = len(found) + out.total()
    say(f"{total:,} pairs, {len(found):,} kept" + (f"; {kinds}" if kinds else ""))
    return found
