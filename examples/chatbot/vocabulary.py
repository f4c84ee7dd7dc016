"""The vocabulary: a number for each of the most frequent words, one for all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from whole import write_whole

from quorate.errors import DataError

SPECIAL = ("<pad>", "<unknown>", "<begin>", "<end>")
PAD, UNKNOWN, BEGIN, END = range(4)


class Vocabulary:
    """Words and their numbers.

    Args:
        words: by number, the special ones first.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._numbers = {word: number for number, word in enumerate(words)}

    @classmethod
    def of(cls, texts: Iterable[Sequence[str]], size: int) -> Vocabulary:
        """The most frequent words of texts: at most ``size``, with the special ones.

        Of two words that are as frequent the one that sorts first comes first, so that every
        process makes the same one.
        """
        counts = Counter(word for text in texts for word in text)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([*SPECIAL, *ranked[: size - len(SPECIAL)]])

    def __len__(self) -> int:
        return len(self._words)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self._words == other._words

    def __hash__(self) -> int:
        return hash(self._words)

    def numbers(self, words: Iterable[str]) -> list[int]:
        """The numbers of words; ``UNKNOWN`` for a word that has none."""
        return [self._numbers.get(word, UNKNOWN) for word in words]

    def unknown(self, words: Iterable[str]) -> list[str]:
        """Those of the words that have no number."""
        return [word for word in words if word not in self._numbers]

    def words(self, numbers: Iterable[int]) -> list[str]:
        """The words of numbers."""
        return [self._words[number] for number in numbers]

    def save(self, path: Path) -> None:
        """Write a word per line, all or nothing."""
        write_whole(path, "".join(f"{word}\n" for word in self._words))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what ``save`` wrote.

        Raises:
            DataError: there is no such file, or it is no vocabulary.
        """
        try:
            words = path.read_bytes().decode().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(path, got=error, expected="a word per line, in UTF-8") from error
        if words.pop() != "":
            raise DataError(path, got="a last line without end", expected="the whole file")
        if tuple(words[: len(SPECIAL)]) != SPECIAL:
            raise DataError(f"{path}, line 1", got=words[:4], expected=list(SPECIAL))
        first: dict[str, int] = {}
        for number, word in enumerate(words, start=1):
            if not word:
                raise DataError(f"{path}, line {number}", got="no word", expected="one")
            if word in first:
                got = f"{word!r}, as in line {first[word]}"
                raise DataError(f"{path}, line {number}", got=got, expected="each word once")
            first[word] = number
        return cls(words)
