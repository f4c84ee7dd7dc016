"""Words: from a text to its words and back, in Chinese (by jieba) and in English."""

from __future__ import annotations

import logging
import re
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

LANGUAGES = ("zh", "en")

_ENGLISH = re.compile(r"[a-z]+(?:'[a-z]+)*|\d+(?:[.,]\d+)*|[^\sa-z\d]")
_SENTENCE_END = {
    "zh": re.compile(r"(?<=[。！？!?])"),
    "en": re.compile(r"(?<=[.!?])\s+(?=[A-Z\d\"'(])"),
}
_HALF_WIDTH = re.compile(r"[?!,;:()](?!\d)")  # but for 1,000 and 12:30
_FULL_WIDTH = dict(zip("?!,;:()", "？！，；：（）", strict=True))
_MARKS_AT_THE_END = re.compile(r"[\s?!.,;:~？！。，；：、…～]+$")  # "(2)" and "50%" keep theirs
_NO_SPACE_BEFORE = set(".,;:!?)%'\"")
_NO_SPACE_AFTER = set("($\"'")


def words(text: str, language: str) -> list[str]:
    """The words of a text; marks of punctuation are words too, white space is none."""
    if language == "en":
        return _ENGLISH.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    cut = _jieba().cut(_HALF_WIDTH.sub(lambda mark: _FULL_WIDTH[mark[0]], text))
    return [word.strip() for word in cut if word.strip()]


def question_words(text: str, language: str) -> list[str]:
    """The words of a question, without the marks at its end: they say nothing that it does not.

    What is learnt from and what is asked both come through here. A text of marks alone keeps them.
    """
    return words(_MARKS_AT_THE_END.sub("", text) or text, language)


def text(words: list[str], language: str) -> str:
    """Words as a person writes them. Not the inverse of ``words``: case and spaces are lost."""
    found = ""
    for word in words:
        if language == "en":
            glued = word[0] in _NO_SPACE_BEFORE or found[-1:] in _NO_SPACE_AFTER
        else:
            glued = not (_is_latin(found[-1:]) and _is_latin(word[0]))
        found += word if glued or not found else f" {word}"
    return found


def first_sentence(text: str, language: str) -> str:
    """The first sentence of a text."""
    return _SENTENCE_END[language].split(text.strip(), maxsplit=1)[0].strip()


def cutter(language: str) -> str:
    """What cuts words, and its version: other versions cut others."""
    if language == "en":
        return f"regex {_ENGLISH.pattern}"
    import jieba

    return f"jieba {jieba.__version__}"


def _is_latin(character: str) -> bool:
    return character.isascii() and character.isalnum()


@cache
def _jieba() -> Any:
    import jieba

    jieba.setLogLevel(logging.WARNING)
    tokenizer = jieba.Tokenizer()
    # It keeps its tables in a file that anyone may put into /tmp, so here it finds none.
    with TemporaryDirectory() as room:
        tokenizer.tmp_dir = room
        tokenizer.initialize()
    return tokenizer
