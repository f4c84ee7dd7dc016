"""examples/chatbot: words, the vocabulary, and what has no word in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chatbot import BASE, example

from quorate.errors import DataError, SettingError

vocabulary = example.vocabulary
words = example.words


def test_english_words_and_back() -> None:
    said = "Don\N{RIGHT SINGLE QUOTATION MARK}t I need 1,500.50 (or more), for a 401k?"
    cut = ["don't", "i", "need", "1,500.50", "(", "or", "more", ")", ",", "for", "a"]
    assert words.words(said, "en") == [*cut, "401", "k", "?"]
    assert words.text(words.words("Yes, it is. (I think)", "en"), "en") == "yes, it is. (i think)"
    assert words.words(" \t ", "en") == []
    assert words.text([], "en") == ""


def test_chinese_words_and_back() -> None:
    said = "医疗保险支付1,000美元吗?"
    cut = words.words(said, "zh")
    assert cut[:2] == ["医疗保险", "支付"]
    assert cut[-1] == "？"  # as the others write it
    assert "1,000" in words.text(cut, "zh")
    assert words.text(["AARP", "life", "是", "保险", "。"], "zh") == "AARP life是保险。"


@pytest.mark.parametrize("language", ["zh", "en"])
def test_a_question_is_the_same_with_and_without_marks_at_its_end(language: str) -> None:
    for bare, marked in (
        ("你是谁", "  你是谁？ "),
        ("你是谁", "你是谁?!"),
        ("who are you", "who are you ...?"),
        ("好吗，谢谢", "好吗，谢谢~"),
    ):
        expected = words.words(bare, language)
        assert words.question_words(marked, language) == expected
    # What says something stays: within a question, a bracket, per cent; and of marks alone all.
    for said in ("好吗？谢谢", "why? (401k)", "what is 50%", "???"):
        assert words.question_words(said, language) == words.words(said, language)
    assert words.question_words(" \t", language) == []


def test_the_first_sentence() -> None:
    assert words.first_sentence(" 是的。这是真的。", "zh") == "是的。"
    assert words.first_sentence("It costs 1.50 a day. Most pay it.", "en") == "It costs 1.50 a day."
    assert words.first_sentence("no end", "en") == "no end"


def test_a_vocabulary_keeps_the_most_frequent_words_and_its_file(tmp_path: Path) -> None:
    texts = [["bb", "aa", "cc"], ["cc", "bb", "dd"], ["险"], ["保险", "公司", "了"], ["了", "保险"]]
    made = vocabulary.Vocabulary.of(texts, BASE + 7)
    # Characters that are there twice (not 公 and 司), then by number and name: aa before dd.
    kept = ["了", "保", "险", "bb", "cc", "保险", "aa"]
    assert made.words(range(BASE, BASE + 7)) == kept
    assert len(made) == BASE + 7
    assert made.not_whole(["cc", "dd", "?"]) == ["dd"]  # ? is a character
    with pytest.raises(SettingError, match=f"got {BASE + 2}, expected at least {BASE + 3:,}"):
        vocabulary.Vocabulary.of(texts, BASE + 2)
    path = tmp_path / "vocabulary.txt"
    made.save(path)
    assert vocabulary.Vocabulary.load(path) == made
    whole = path.read_text()
    for text, wrong in (
        (whole[:-1], "a last line without end"),
        (whole + "\n", f"line {BASE + 8}: got no word"),
        (whole + "bb\n", f"line {BASE + 8}: got 'bb', as in line {BASE + 4}"),
        (whole.removeprefix("<pad>\n"), "line 1: got <begin>, expected <pad>"),
        ("<pad>\n", f"got 1 lines, expected at least {BASE}"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=wrong):
            vocabulary.Vocabulary.load(path)
    with pytest.raises(DataError, match="expected a piece per line"):
        vocabulary.Vocabulary.load(tmp_path / "none.txt")


def test_a_word_that_is_not_there_is_spelt_by_the_longest_that_are() -> None:
    made = vocabulary.Vocabulary([*vocabulary.BASE, "保", "险", "保险", "保险公司", "car"])

    def pieces(*said: str) -> list[str]:
        return [made._pieces[number] for number in made.numbers(said)]

    assert pieces("保险公司保险保", "car") == ["保险公司", "保险", "保", "car"]
    assert pieces("cargo") == ["c", "##a", "##r", "##g", "##o"]  # of which "car" says nothing
    assert pieces("险B") == ["险", "##B"]
    assert pieces("é") == ["<0xC3>", "<0xA9>"]
    assert made.words(made.letters(["保险", "car"])) == ["保", "险", "car"]
    assert len(made.letters(["保险", "car"])) == 5


@given(st.lists(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1), max_size=8))
def test_no_text_has_a_word_without_a_number(said: list[str]) -> None:
    made = vocabulary.Vocabulary([*vocabulary.BASE, "保", "险", "保险", "é", "ab"])
    for numbers in (made.numbers(said), made.letters(said)):
        assert all(2 < number < len(made) for number in numbers)
        assert "".join(made.words(numbers)) == "".join(said)
        assert made.numbers(["<pad>", "##a", "<0xC3>"]) != [0, BASE - 94 - 94, 3 + 0xC3]
