"""The vocabulary: a number for each of the most frequent words, and pieces that spell all others.

No text has a word without a number. A word that is not in the vocabulary is cut into the longest
words that are, its last resort being characters; ASCII characters within a word are pieces of their
own, marked as what goes on (as in WordPiece, Wu et al. 2016), and characters that the training set
does not have twice are their bytes in UTF-8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from whole import write_whole

from quorate.errors import DataError, SettingError

SPECIAL = ("<pad>", "<begin>", "<end>")
PAD, BEGIN, END = range(3)

GOES_ON = "##"
_ASCII = tuple(map(chr, range(0x21, 0x7F)))
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
BASE = (*SPECIAL, *_BYTES, *(GOES_ON + character for character in _ASCII), *_ASCII)

_FIRST_BYTE = len(SPECIAL)
_FIRST_GOING_ON = _FIRST_BYTE + len(_BYTES)
_FIRST_WORD = _FIRST_GOING_ON + len(_ASCII)  # from here on a piece is what it looks like

_LEAST_TIMES = 2  # that a character is there; bytes spell the others, and are learnt from them


class Vocabulary:
    """Pieces and their numbers.

    Args:
        pieces: by number, those of ``BASE`` first.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = tuple(pieces)
        words = enumerate(self._pieces[_FIRST_WORD:], start=_FIRST_WORD)
        self._numbers = {word: number for number, word in words}

    @classmethod
    def of(cls, texts: Iterable[Sequence[str]], size: int) -> Vocabulary:
        """Of texts all characters that are there twice, and the most frequent words.

        Of two words that are as frequent the one that sorts first comes first, so that every
        process makes the same one.

        Args:
            texts: each its words.
            size: pieces, at most.

        Raises:
            SettingError: the characters alone are more.
        """
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        times: Counter[str] = Counter()
        for word, count in counts.items():
            for character in word:
                times[character] += count
        found = dict.fromkeys(_ASCII)
        often = sorted(c for c, count in times.items() if count >= _LEAST_TIMES)
        found.update(dict.fromkeys(often))
        least = _FIRST_WORD + len(found)
        if size < least:
            expected = f"at least {least:,}: bytes, and the characters of these texts"
            raise SettingError("vocabulary", size, expected, "choose more")
        for word in sorted(counts, key=lambda word: (-counts[word], word)):
            if _FIRST_WORD + len(found) == size:
                break
            found[word] = None
        return cls([*BASE[:_FIRST_WORD], *found])

    def __len__(self) -> int:
        return len(self._pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self._pieces == other._pieces

    def __hash__(self) -> int:
        return hash(self._pieces)

    def numbers(self, words: Iterable[str]) -> list[int]:
        """The numbers of words: one each, or those of the pieces that spell it."""
        found: list[int] = []
        for word in words:
            number = self._numbers.get(word)
            found += [number] if number is not None else self._spelt(word, longest=len(word))
        return found

    def letters(self, words: Iterable[str]) -> list[int]:
        """The numbers of the characters of words, whether they are in the vocabulary or not."""
        return [number for word in words for number in self._spelt(word, longest=1)]

    def not_whole(self, words: Iterable[str]) -> list[str]:
        """Those of the words that are spelt."""
        return [word for word in words if word not in self._numbers]

    def words(self, numbers: Iterable[int]) -> list[str]:
        """The words of numbers. What is spelt of words and characters comes as these."""
        found: list[str] = []
        some_bytes = bytearray()
        for number in numbers:
            if _FIRST_BYTE <= number < _FIRST_GOING_ON:
                some_bytes.append(number - _FIRST_BYTE)
                continue
            found += _characters(some_bytes)
            if _FIRST_GOING_ON <= number < _FIRST_WORD:
                found[-1:] = ["".join(found[-1:]) + self._pieces[number].removeprefix(GOES_ON)]
            else:
                found.append(self._pieces[number])
        return [*found, *_characters(some_bytes)]

    def _spelt(self, word: str, longest: int) -> Iterator[int]:
        """The pieces of a word, each the longest that fits."""
        at = 0
        while at < len(word):
            if at and word[at] in _ASCII:
                yield _FIRST_GOING_ON + _ASCII.index(word[at])
                at += 1
                continue
            for end in range(min(len(word), at + longest), at, -1):
                if word[at].isascii() and end > at + 1:
                    continue  # "car" says nothing of "cargo"
                if (number := self._numbers.get(word[at:end])) is not None:
                    yield number
                    at = end
                    break
            else:
                yield from (_FIRST_BYTE + byte for byte in word[at].encode())
                at += 1

    def save(self, path: Path) -> None:
        """Write a piece per line, all or nothing."""
        write_whole(path, "".join(f"{piece}\n" for piece in self._pieces))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what ``save`` wrote.

        Raises:
            DataError: there is no such file, or it is no vocabulary.
        """
        try:
            pieces = path.read_bytes().decode().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(path, got=error, expected="a piece per line, in UTF-8") from error
        if pieces.pop() != "":
            raise DataError(path, got="a last line without end", expected="the whole file")
        for number, (got, expected) in enumerate(zip(pieces, BASE, strict=False), start=1):
            if got != expected:
                raise DataError(f"{path}, line {number}", got=got, expected=expected)
        if len(pieces) < len(BASE):
            got = f"{len(pieces)} lines"
            raise DataError(path, got=got, expected=f"at least {len(BASE)}: bytes, ASCII, words")
        first: dict[str, int] = {}
        for number, piece in enumerate(pieces[_FIRST_WORD:], start=_FIRST_WORD + 1):
            if not piece:
                raise DataError(f"{path}, line {number}", got="no word", expected="one")
            if piece in first:
                got = f"{piece!r}, as in line {first[piece]}"
                raise DataError(f"{path}, line {number}", got=got, expected="each word once")
            first[piece] = number
        return cls(pieces)


def _characters(some_bytes: bytearray) -> list[str]:
    """The characters of bytes, each a word, and no bytes any more."""
    found = list(bytes(some_bytes).decode(errors="replace"))
    some_bytes.clear()
    return found
