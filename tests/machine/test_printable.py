"""Text of an unknown origin reaches a terminal without anything that a terminal obeys."""

from __future__ import annotations

import sys
import unicodedata

from quorate.machine.printable import printable


def test_ordinary_text_of_any_language_stays_as_it_is() -> None:
    for text in ("", "runs/fashion", "a b", "naïve", "模型 已保存", "Ω≈ç√", "C:\\runs\\x1b"):
        assert printable(text) == text


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("\x1b[2J\x1b]0;mine\x07") == "\\x1b[2J\\x1b]0;mine\\x07"
    assert printable("one\ntwo\r\x00\x7f\x9b") == "one\\ntwo\\r\\x00\\x7f\\x9b"
    assert printable("\u202eabc\u2028\ud800") == "\\u202eabc\\u2028\\ud800"


def test_of_all_characters_none_is_obeyed_and_all_can_be_written() -> None:
    for start in range(0, sys.maxunicode + 1, 4096):
        text = "".join(map(chr, range(start, min(start + 4096, sys.maxunicode + 1))))
        shown = printable(text, 4096)
        shown.encode()
        kinds = {unicodedata.category(character) for character in shown}
        assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_long_text_is_cut_in_the_middle_and_says_how_much_is_missing() -> None:
    shown = printable("a" * 50_000_000 + "end", 30)
    assert shown == "a" * 20 + "... 49,999,973 characters ..." + "a" * 7 + "end"
    assert len(printable("\x00" * 1_000_000)) < 2000


def test_other_objects_are_shown_by_their_text() -> None:
    assert printable(3) == "3"
    assert printable(None) == "None"
