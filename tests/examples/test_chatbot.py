"""examples/chatbot: words, pairs that are bad, padding, beam search, BLEU over shards, a whole run.

Legend: B rows, T words of a question, U of an answer, V words of the vocabulary, K hypotheses.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import math
import os
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU
from support.warm import WARM

import quorate
from quorate.data import cache_dir
from quorate.errors import DataError, SettingError

FOLDER = Path(__file__).parents[2] / "examples" / "chatbot"


@contextmanager
def its_modules() -> Iterator[None]:
    """Names such as ``data`` are the example's within the block, and anybody's after it."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


with its_modules():
    answers, bleu, buckets, chat, chatterbot, confidence, data, export, loss, model = map(
        importlib.import_module,
        (
            *("answers", "bleu", "buckets", "chat", "chatterbot", "confidence", "data"),
            *("export", "loss", "model"),
        ),
    )
    options, pairs, prepared, saved_run, single, small_talk, target, vocabulary, words = map(
        importlib.import_module,
        (
            *("options", "pairs", "prepared", "saved_run", "single", "small_talk", "target"),
            *("vocabulary", "words"),
        ),
    )

BASE = len(vocabulary.BASE)  # pieces that every vocabulary has


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These networks are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seq2seq(size: int = 8, units: int = 8, seed: int = 0, **options: Any) -> Any:
    """A network of large random weights, whose answers differ."""
    torch.manual_seed(seed)
    made = model.Seq2Seq(size, units=units, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.6)
    return made.eval()


def random_rows(count: int, size: int, seed: int = 0, first: int = 3) -> list[Any]:
    draw = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return draw.choices(range(first, size), k=draw.randint(least, most))

    return [
        data.Row(*map(torch.tensor, (some(1, 9), some(2, 20), [1, *some(3, 12), 2])))
        for _ in range(count)
    ]


def known(count: int) -> Any:
    """A vocabulary that has so many words."""
    return vocabulary.Vocabulary([*vocabulary.BASE, *(f"w{n}" for n in range(count))])


# --- words ----------------------------------------------------------------------------------------


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


# --- bad data -------------------------------------------------------------------------------------

BAD = {
    b"": "an empty line",
    b" \t ": "an empty line",
    b"what is it": "no answer (no tab)",
    b"what is it\t  ": "no answer",
    b"\tit is this": "no question",
    b"what\tit is\tthis": "3 fields",
    b"what\tit \xff is": "not UTF-8 at byte 8",
}


@pytest.mark.parametrize("line", BAD)
def test_a_line_that_is_no_pair_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"what\tit is this\n" + line + b"\nwho\tit is me\n")
    with pytest.raises(DataError) as raised:
        pairs.read_pairs(path)
    assert str(raised.value).startswith(f"{path}, line 2: got {BAD[line]}, expected question, tab")


def test_bad_lines_are_counted_where_the_user_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"\xef\xbb\xbfwhat\tit is this\n" + b"\n".join(BAD) + b"\r\nwho\tit is me")
    said: list[str] = []
    found = pairs.read_pairs(path, skip_bad=True, say=said.append)
    assert found == [("what", "it is this"), ("who", "it is me")]
    assert said == [
        f"{path}: 7 of 9 lines skipped: 1 3 fields, 2 an empty line, 1 no answer, 1 no answer "
        "(no tab), 1 no question, 1 not UTF-8; first line 2: an empty line"
    ]


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.tsv"
    empty.write_bytes(b"")
    with pytest.raises(DataError, match=r"empty.tsv: got no pair"):
        pairs.read_pairs(empty)
    with pytest.raises(DataError, match="got No such file or directory"):
        pairs.read_pairs(tmp_path / "none.tsv")
    with pytest.raises(DataError, match="got Is a directory"):
        pairs.read_pairs(tmp_path)


def test_what_is_not_learnt_from_is_counted() -> None:
    said: list[str] = []
    pair = pairs.Pair
    found = pairs.tokenized(
        [
            pair("What is it?", "It is this. And more."),
            pair("what is it?", "It is this."),
            pair("what " * 21, "it is this"),
            pair("who", "me"),
            pair("who", "me " * 31),
            *(pair(f"why {n}", "great question!") for n in range(11)),
            *(pair(f"why {n}", "who knows that?") for n in range(10)),
        ],
        "en",
        said.append,
    )
    assert found[0] == (["what", "is", "it"], ["it", "is", "this", "."])
    assert found[1:] == [(["why", str(n)], ["who", "knows", "that", "?"]) for n in range(10)]
    assert said == [
        "26 pairs, 11 kept; 1 there twice, 1 with a question of more than 20 words, 1 with an "
        "answer of fewer than 3 words, 1 with an answer of more than 30 words, 11 with an answer "
        "that more than 10 questions have"
    ]


def test_prepared_pairs_are_made_once_and_again_if_damaged(tmp_path: Path) -> None:
    rows = [([4, 5], [6], [1, 7, 2]), ([8], [9, 9], [1, 2])]
    made = prepared.Made(known(3), {"train": rows, "test": rows[:1]}, [2])
    calls: list[int] = []
    said: list[str] = []

    def make() -> Any:
        calls.append(1)
        return made

    def check(name: str) -> None:
        found = prepared.prepared(tmp_path, "x", [name], make, said.append)
        assert (found.vocabulary, found.counts) == (known(3), [2])
        assert found.parts.keys() == {"train", "test"}
        assert [tuple(map(torch.Tensor.tolist, row)) for row in found.parts["train"]] == rows
        assert len(found.parts["test"]) == 1

    check("1")
    check("1")
    assert (len(calls), said) == (1, [])
    check("2")
    assert len(calls) == 2
    first, _ = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for name in ("train.tokens", "vocabulary.txt", "contents.json"):
        content = (first / name).read_bytes()
        for damage in (content[:-3], b"", content[:70] + b"?" + content[71:]):
            (first / name).write_bytes(damage)
            check("1")
            assert said == [f"{first} is damaged: making it again"]
            said.clear()
    (first / "test.tokens").unlink()
    check("1")
    assert said.pop().endswith("making it again")


def test_rows_are_mapped_and_travel_as_the_name_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "data", data)  # for pickle, which asks by name
    rows = [([n + 3] * 9, [4] * 30, [1, *[5] * (n % 7), 2]) for n in range(500)]
    made = prepared.prepared(tmp_path, "x", [], lambda: prepared.Made(known(0), {"a": rows}, []))
    some = data.Pairs(made.parts["a"], np.arange(500))
    assert len(pickle.dumps(some)) < 20_000  # a place of 8 bytes for each, and no numbers of theirs
    again = pickle.loads(pickle.dumps(some))
    assert [row.question.tolist() for row in again] == [question for question, _, _ in rows]
    assert again.lengths.tolist() == [len(answer) for _, _, answer in rows]
    short = some.by_length()
    assert short.lengths.tolist() == sorted(some.lengths)
    assert sorted(int(row.question[0]) for row in short) == [n + 3 for n in range(500)]
    other = some.with_other_questions()
    assert sorted(other.lengths) == sorted(some.lengths)
    assert not [n for n, row in enumerate(other) if row.question.tolist() == rows[n][0]]


def test_all_answers_to_a_question_are_in_one_part() -> None:
    tokens = [
        pairs.Tokens(["q", str(n // 3), *(["?"] if n % 3 else [])], ["a", "b", str(n)])
        for n in range(3000)
    ]
    parts = data.split(tokens)
    assert sum(map(len, parts.values())) == 3000
    asked = {name: {t.question[1] for t in part} for name, part in parts.items()}
    for one, other in itertools.combinations(asked.values(), 2):
        assert not one & other
    assert all(60 < len(parts[name]) < 240 for name in ("test", "validation"))  # 5 per cent
    assert data.split(tokens[:10])["train"] == [t for t in parts["train"] if t in tokens[:10]]


# --- padding and shards change nothing ------------------------------------------------------------


def test_batches_of_like_length_hold_every_row_once() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(3, 50, 1003)
    rows = draw.permutation(1003)
    order = buckets.ByLength(lengths, 16, window=10)
    found = order(rows)
    assert sorted(found) == list(range(1003))
    assert np.array_equal(found, order(rows.copy()))
    assert np.array_equal(found[992:], rows[992:])  # what is left has no batch of its own length

    def padded(rows: np.ndarray) -> int:
        return sum(lengths[batch].max() * 16 for batch in rows[:992].reshape(-1, 16))

    assert padded(found) < 1.15 * lengths.sum() < 1.5 * lengths.sum() < padded(rows)
    # Neither batches nor the rows in one come by length.
    longest = [lengths[batch].max() for batch in found[:160].reshape(-1, 16)]
    assert longest != sorted(longest)
    halves = found[:992].reshape(-1, 2, 8)
    assert abs(np.mean(lengths[halves[:, 0]] - lengths[halves[:, 1]])) < 0.5


def test_padding_changes_nothing() -> None:
    size = BASE + 26
    network, rows = seq2seq(size=size, units=16), random_rows(12, size, first=BASE)
    narrow = data.collate(rows)
    wide = data.Batch(
        data.padded([row.question for row in rows], 25),
        narrow.letters,
        data.padded([row.answer for row in rows], 40),
    )
    assert wide.questions.shape == (12, 25)
    assert wide.answers.shape == (12, 40)
    mean = loss.Loss(known(26), "en")
    found = []
    for batch in (narrow, wide):
        values = mean(network, batch)
        grads = torch.autograd.grad(values["loss"], list(network.parameters()))
        found.append((values, grads))
    (one, ones), (other, others) = found
    assert one["loss"].item() == pytest.approx(other["loss"].item(), abs=2e-6)
    assert one["weight"] == other["weight"] == sum(len(row.answer) - 1 for row in rows)
    assert torch.equal(one["bleu"], other["bleu"])
    for a, b in zip(ones, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    # What stands behind the end is not looked at, and the question's length is.
    scribbled = narrow._replace(answers=narrow.answers.clone())
    scribbled.questions[0, 0] = BASE + (scribbled.questions[0, 0] == BASE)
    assert mean(network, scribbled)["loss"].item() != pytest.approx(one["loss"].item(), abs=1e-4)


def test_shards_weighted_by_words_are_the_whole_batch() -> None:
    size = BASE + 26
    network, rows = seq2seq(size=size, units=16), random_rows(12, size, first=BASE)
    mean = loss.Loss(known(26), "en")
    whole = mean(network, data.collate(rows))
    for shards in (2, 3, 5):
        parts = [
            mean(network, data.collate(rows[s * 12 // shards : (s + 1) * 12 // shards]))
            for s in range(shards)
        ]
        total = sum(int(part["weight"]) for part in parts)
        assert total == int(whole["weight"])
        summed = sum(float(part["loss"].detach()) * int(part["weight"]) for part in parts)
        assert summed / total == pytest.approx(whole["loss"].item(), abs=2e-6)
        plain = sum(float(part["loss"].detach()) for part in parts) / shards
        assert abs(plain - whole["loss"].item()) > 1e-4  # what a mean of means would be
        assert torch.equal(sum(part["bleu"] for part in parts), whole["bleu"])


# --- greedy and beam search -----------------------------------------------------------------------

LONGEST = 4


@torch.no_grad()
def every_answer(network: Any, question: torch.Tensor) -> Iterator[tuple[list[int], float, int]]:
    """All answers of at most four words that there are with V = 7, by brute force.

    Each with its log-probability and its length, the end included.
    """
    for length in range(1, LONGEST + 1):
        sequences = [
            sequence
            for sequence in itertools.product(range(2, 7), repeat=length)
            if 2 not in sequence[:-1] and (sequence[-1] == 2 or length == LONGEST)
        ]
        words = torch.tensor(sequences)
        read, state = network.read(question.expand(len(words), -1))
        before = torch.cat([torch.full((len(words), 1), 1), words[:, :-1]], 1)
        features, _ = network.write(read, state, before)
        logits = network.logits(features)
        logits[:, :, [0, 1]] = float("-inf")
        sums = logits.log_softmax(2).gather(2, words[..., None]).sum((1, 2))
        for sequence, total in zip(sequences, sums.tolist(), strict=True):
            yield [word for word in sequence if word != 2], total, length


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_a_beam_as_wide_as_there_are_answers_is_an_exhaustive_search(penalty: float) -> None:
    network = seq2seq(size=7, seed=3)
    question = torch.tensor([[3, 6, 4]])
    ranked = sorted(
        (
            (total / length**penalty, words)
            for words, total, length in every_answer(network, question)
        ),
        reverse=True,
    )
    assert len(ranked) == 1 + 4 + 16 + 64 + 256
    found = answers.beam(network, question, 700, longest=LONGEST, length_penalty=penalty)[0]
    reachable = [answer for answer in found if answer.score > -math.inf]
    assert len(reachable) == len(ranked)
    for answer, (score, expected) in zip(reachable, ranked, strict=True):
        assert answer.words == expected
        assert answer.score == pytest.approx(score, abs=1e-4)
    # A narrow one finds the best here too, which greedy search does not.
    narrow = answers.beam(network, question, 5, longest=LONGEST, length_penalty=penalty)[0]
    assert narrow[0].words == ranked[0][1]


def test_a_beam_of_one_is_greedy() -> None:
    distinct: set[tuple[int, ...]] = set()
    for seed in range(5):
        network = seq2seq(size=20, units=12, seed=seed)
        questions = data.collate(random_rows(40, 20, seed)).questions
        plain = answers.greedy(network, questions, longest=12)
        distinct |= {tuple(words) for words in plain}
        best = answers.beam(network, questions, 1, longest=12)
        assert [[answer.words for answer in one] for one in best] == [[words] for words in plain]
    assert len(distinct) > 20
    assert not {0, 1} & {word for words in distinct for word in words}


def test_questions_are_answered_together_as_they_are_alone() -> None:
    network = seq2seq(size=20, units=12, seed=1)
    rows = random_rows(16, 20)
    together = answers.beam(network, data.collate(rows).questions, 4, longest=10)
    for row, found in zip(rows, together, strict=True):
        (alone,) = answers.beam(network, row.question[None].long(), 4, longest=10)
        assert [answer.words for answer in found] == [answer.words for answer in alone]
        assert [a.score for a in found] == pytest.approx([a.score for a in alone], abs=1e-4)
        assert [a.score for a in found] == sorted((a.score for a in found), reverse=True)


def test_a_beam_takes_no_longer_than_its_hypotheses_one_by_one() -> None:
    network = seq2seq(size=2000, units=96)
    questions = data.collate(random_rows(12, 2000)).questions
    banned = [0, 1, 2]  # without an end both take as many steps

    def seconds(search: Any) -> float:
        taken = []
        for _ in range(3):
            begun = time.perf_counter()
            search()
            taken.append(time.perf_counter() - begun)
        return min(taken)

    plain = seconds(lambda: answers.greedy(network, questions, banned=banned))
    best = seconds(lambda: answers.beam(network, questions, 5, banned=banned))
    assert best <= 1.5 * 5 * plain, f"beam of 5: {best:.3f} s, greedy: {plain:.3f} s"


def n_grams(said: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(said[n : n + size]) for n in range(len(said) - size + 1)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_n_gram_is_said_twice(size: int) -> None:
    """Greedily as by hand, word for word; and none of a beam's hypotheses has one."""
    network = seq2seq(size=12, units=12, seed=2)
    questions = data.collate(random_rows(12, 12)).questions
    plain = answers.greedy(network, questions, longest=20)
    found = answers.greedy(network, questions, longest=20, no_repeat=size)
    repeats = [len(n_grams(said, size)) > len(set(n_grams(said, size))) for said in plain]
    assert sum(repeats) > 2  # of what is to be blocked there is some
    for said, free, repeated, question in zip(found, plain, repeats, questions, strict=True):
        assert len(n_grams(said, size)) == len(set(n_grams(said, size)))
        assert repeated or said == free
        by_hand = by_hand_without_repeats(network, question[None], size)
        assert said == by_hand
    for one in answers.beam(network, questions, 4, longest=20, no_repeat=size):
        for answer in one:
            if answer.score > -math.inf:
                assert len(n_grams(answer.words, size)) == len(set(n_grams(answer.words, size)))
    alone = answers.beam(network, questions, 1, longest=20, no_repeat=size)
    assert [one[0].words for one in alone] == found


@torch.no_grad()
def by_hand_without_repeats(network: Any, question: torch.Tensor, size: int) -> list[int]:
    """Each word the likeliest that ends no n-gram that was there: from the whole answer so far."""
    said: list[int] = []
    while len(said) < 20:
        features = network(question, torch.tensor([[1, *said]]))
        for word in network.logits(features)[0, -1].argsort(descending=True).tolist():
            again = n_grams([*said, word], size)
            if word == 2 or (word > 2 and again[-1:] and again[-1] not in again[:-1]):
                break
            if word > 2 and not again:
                break
        if word == 2:
            break
        said.append(word)
    return said


# --- letters, attention, confidence, export -------------------------------------------------------


def test_some_questions_are_read_letter_by_letter() -> None:
    rows = random_rows(200, 30)
    batch = data.collate(rows)
    draws = [quorate.Draws(0, epoch, range(200)) for epoch in (0, 0, 1)]
    one, same, other = (data.Spelt(0.2)(batch, draw).questions for draw in draws)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    spelt = 0
    for row, said in zip(rows, one, strict=True):
        real = said[said != 0].tolist()
        assert real in (row.question.tolist(), row.letters.tolist())
        spelt += real == row.letters.tolist()
    assert 20 < spelt < 60
    assert data.Spelt(0.0)(batch, quorate.Draws(0, 0, range(200))) is batch
    every = data.Spelt(1.0)(batch, quorate.Draws(0, 0, range(200))).questions
    assert torch.equal(every[:, : batch.letters.shape[1]], batch.letters)


def test_without_attention_the_question_is_heard_by_the_state_alone() -> None:
    network = seq2seq(size=20, units=12, attention=False)
    assert not [name for name, _ in network.named_parameters() if "attention" in name]
    questions = data.collate(random_rows(8, 20)).questions
    said = torch.ones((8, 4), dtype=torch.int64)
    read, state = network.read(questions)
    silent = tuple(torch.zeros_like(part) for part in state)
    heard, _ = network.write(read, state, said)
    deaf, _ = network.write(read, silent, said)
    assert not torch.allclose(heard[0], heard[1])
    assert torch.allclose(deaf, deaf[:1].expand_as(deaf))


def test_confidence_is_what_the_question_adds_to_the_answer() -> None:
    """Against a sum over words, one by one; of a network that does not listen it is 0."""
    network = seq2seq(size=20, units=12)
    rows = random_rows(40, 20)
    asked = [row.question.tolist() for row in rows]
    said = [row.answer[1:-1].tolist() for row in rows]
    others = [[5, 6], [7], [8, 9, 10]]
    found = confidence.confidences(network, asked, said, others)

    @torch.no_grad()
    def log(question: list[int], answer: list[int]) -> float:
        features = network(torch.tensor([question]), torch.tensor([[1, *answer]]))
        logs = network.logits(features)[0].log_softmax(1)
        return sum(float(logs[n, word]) for n, word in enumerate([*answer, 2]))

    for question, answer, value in zip(asked[:10], said, found, strict=False):
        mean = sum(math.exp(log(other, answer)) for other in others) / len(others)
        expected = (log(question, answer) - math.log(mean)) / (len(answer) + 1)
        assert value == pytest.approx(expected, abs=1e-4)
    with torch.no_grad():
        network.combined.weight.zero_()
    deaf = confidence.confidences(network, asked, said, others)
    assert deaf == pytest.approx([0.0] * 40, abs=1e-5)


@pytest.mark.slow
def test_exported_programs_say_what_the_network_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "LONGEST", 9)  # each of which is to be traced
    for attention in (True, False):
        network = seq2seq(size=40, units=12, layers=2, attention=attention)
        for name, program in zip(
            (export.READER, export.WRITER), export.exported(network), strict=True
        ):
            torch.export.save(program, tmp_path / name)
        programs = export.Exported.load(tmp_path)
        run = saved_run.SavedRun(network, known(0), "en", 2)
        asked = [[5], *(row.question.tolist() for row in random_rows(6, 40)), [7] * export.LONGEST]
        assert export.difference(run, programs, asked) < 1e-5
        with pytest.raises(DataError, match="got 10 pieces, expected at most 9"):
            programs.read(torch.ones((1, 10), dtype=torch.int64))
        with torch.no_grad():
            network.bias[9] += 100.0  # another network
        with pytest.raises(DataError, match="the exported programs, asked"):
            export.difference(run, programs, asked)
    (tmp_path / export.WRITER).write_bytes(b"none")
    with pytest.raises(DataError, match=r"run export\.py"):
        export.Exported.load(tmp_path)


# --- options --------------------------------------------------------------------------------------


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    return options.parse("a chatbot", "runs/x")


def test_a_flag_goes_before_the_recipe_of_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = parsed(monkeypatch, "--data", "riddles")
    assert (plain.epochs, plain.spell, plain.least_answer) == (16, 0.2, [1])
    assert plain.target == {"unigram": 0.15, "others": 0.83}
    said = [
        "--epochs",
        "9",
        "--least-answer",
        "2",
        "--target",
        "others=",
        "--target",
        "recalled=0.5",
    ]
    mixed = parsed(monkeypatch, "--data", "riddles", "x.tsv", *said)
    assert (mixed.epochs, mixed.least_answer) == (9, [2, 2])
    assert mixed.target == {"unigram": 0.15, "recalled": 0.5}
    own = parsed(monkeypatch, "--data", "x.tsv", "small_talk")
    assert own.least_answer == [3, 1]
    assert own.target == {"unigram": 0.25, "others": 0.9}  # of pairs that nobody has tried
    assert parsed(monkeypatch, "--data", "insuranceqa").target == {"unigram": 0.11, "others": 0.6}
    for wrong in (["--target", "bleu=3"], ["--target", "unigram"], ["--target", "unigram=x"], []):
        with pytest.raises(SystemExit) as ended:
            parsed(monkeypatch, *(["--data", "riddles"] if wrong else []), *wrong)
        assert ended.value.code == 2


def test_the_numbers_of_the_optimizer_are_those_of_the_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = ["--optimizer", "sgd", "--lr", "2", "--lr-end", "0.25", "--weight-decay", "0.5"]
    chosen = parsed(monkeypatch, "--data", "riddles", *said)
    weight = torch.nn.Parameter(torch.tensor([4.0]))
    made = options.optimizer(chosen, [weight])
    cosine = options.schedule(chosen, made, 10)
    weight.grad = torch.zeros(1)
    made.step()
    assert weight.item() == 4.0 - 2 * 0.5 * 4.0
    for _ in range(10):
        cosine.step()
    assert made.param_groups[0]["lr"] == pytest.approx(0.5)
    adam = parsed(monkeypatch, "--data", "riddles", "--no-attention")
    assert isinstance(options.optimizer(adam, [weight]), torch.optim.Adam)
    assert not options.network(adam, 5)["attention"]


@pytest.mark.parametrize("language", ["zh", "en"])
def test_small_talk_is_pairs_that_do_not_contradict_each_other(language: str) -> None:
    found = pairs.tokenized(small_talk.load(language), language, least_answer=1)
    asked = ["".join(c for word in pair.question for c in word if c.isalnum()) for pair in found]
    assert len(found) == len(set(asked)) > 100
    assert len(found) == len(small_talk.load(language))  # none is left out
    wanted = {"zh": ["你好", "你是谁"], "en": ["hello", "whoareyou"]}[language]
    learnt = {
        bare
        for bare, pair in zip(asked, found, strict=True)
        if data.part_of(pair.question) == "train"
    }
    assert learnt.issuperset(wanted)


def test_data_sets_are_mixed_as_often_as_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUORATE_DATA", str(tmp_path / "cache"))
    own = tmp_path / "own.tsv"
    own.write_text("".join(f"what is number {n}?\tit is the number {n}.\n" for n in range(300)))
    found = {}
    for times in ((), (1, 5)):
        said: list[str] = []
        found[times] = data.load(
            [str(own), "small_talk"],
            "en",
            vocabulary_size=1200,
            least_answer=[3, 1],
            times=times,
            say=said.append,
        )
    assert not said  # the second time it was there
    counts = [
        Counter(" ".join(map(str, row.answer.tolist())) for row in mixed.train)
        for mixed in found.values()
    ]
    assert set(counts[0]) == set(counts[1])
    factors = {counts[1][answer] / count for answer, count in counts[0].items()}
    assert factors == {1, 5}
    assert found[()].questions == found[(1, 5)].questions
    with pytest.raises(SettingError, match="times: got 1, expected 2"):
        data.load(
            [str(own), "small_talk"], "en", vocabulary_size=900, least_answer=[3, 1], times=[2]
        )
    own.write_text("what is it?\tit is this one.\n")
    with pytest.raises(DataError, match="got no question for the"):
        data.load([str(own)], "en", vocabulary_size=900, least_answer=[3])


# --- BLEU -----------------------------------------------------------------------------------------


def test_counts_of_shards_add_up_to_sacrebleu() -> None:
    draw = random.Random(0)
    said = [" ".join(draw.choices("abcdef", k=draw.randint(1, 9))) for _ in range(40)]
    wanted = [" ".join(draw.choices("abcdef", k=draw.randint(3, 9))) for _ in range(40)]
    expected = BLEU().corpus_score(said, [wanted]).score
    for shards in (1, 3, 7):
        total = sum(bleu.counts(said[s::shards], wanted[s::shards], "en") for s in range(shards))
        assert bleu.finish(total) == expected
    assert bleu.finish(bleu.counts(["好的保险。"], ["好的保险。"], "zh")) == pytest.approx(100)
    assert bleu.finish(bleu.counts([""], ["a b c"], "en")) == 0.0


def unlikely(network: Any, pieces: list[int]) -> Any:
    """The network, which says none of the pieces."""
    with torch.no_grad():
        network.bias[pieces] = -1e4
    return network


def test_bleu_and_loss_are_the_same_bits_on_one_two_and_three_workers() -> None:
    size = BASE + 8  # few words: answers have some of the right ones
    rows = random_rows(30, size, first=BASE)
    words_known = known(8)
    banned = [n for n in range(BASE) if n != 2]
    found = []
    for workers in (1, 2, 3):
        trainer = quorate.Trainer(
            lambda: unlikely(seq2seq(size=size, units=12), banned),
            loss.Loss(words_known, "en"),
            totals={"bleu": bleu.finish},
            optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
            batch_size=12,
            shards=3,
            devices="cpu",
            workers=workers,
            loading=quorate.Loading(collate=data.collate),
        )
        found.append(trainer.evaluate(rows))
    assert found[0] == found[1] == found[2]
    network = unlikely(seq2seq(size=size, units=12), banned)
    said, wanted = (
        [" ".join(words_known.words(numbers)) for numbers in every]
        for every in (
            answers.greedy(network, data.collate(rows).questions),
            [row.answer[1:-1].tolist() for row in rows],
        )
    )
    expected = BLEU().corpus_score(said, [wanted]).score
    assert found[0]["bleu"] == pytest.approx(expected)
    assert expected > 0


# --- a whole run ----------------------------------------------------------------------------------

COLOURS = ["red", "blue", "green", "white", "black", "grey", "brown", "pink", "gold"]
THINGS = ["house", "car", "boat", "tree", "book", "lamp", "chair", "table", "horse", "shirt"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    lines = [
        f"{ask} the {colour} {thing}?\tthe {thing} is {colour} and {end}."
        for ask, end in (("what is", "cheap"), ("how is", "well"), ("where is", "here"))
        for colour in COLOURS
        for thing in THINGS
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(tmp_path: Path, name: str, *arguments: str, options: tuple[str, ...]) -> tuple[int, str]:
    command = ["run", "--devices", "cpu", *options, "--run-dir", str(tmp_path / name)]
    small = ("--language", "en", "--units", "32", "--layers", "1", "--batch-size", "24")
    code, out, err = WARM.run(
        [*command, str(FOLDER / "train.py"), *small, *arguments],
        {**os.environ, "QUORATE_DATA": str(tmp_path / "cache")},
        120,
    )
    return code, out + err


def validations(run_dir: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["validation"] for line in lines if "validation" in line]


def digest_of(run_dir: Path) -> str:
    code, out, err = WARM.run(["inspect", str(run_dir), "--json"], os.environ, 60)
    assert code == 0, err
    found: str = json.loads(out)["digest"]
    return found


@pytest.mark.slow
def test_a_run_reaches_its_target_on_any_workers_and_can_be_talked_to(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    learn = ("--data", str(file), "--dropout", "0.1", "--lr", "0.01", "--epochs", "10")
    two = ("--workers", "2", "--engine", "processes")
    one = ("--workers", "1", "--engine", "towers")
    code, said = run(tmp_path, "two", *learn, options=two)
    assert code == 0, said
    assert "24 rows = 2 shards x 12 on 2 cpu workers" in said
    assert "validation  loss" in said
    assert "bleu" in said
    assert run(tmp_path, "one", *learn, options=one)[0] == 0
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two")
    found_one, found_two = (validations(tmp_path / name) for name in ("one", "two"))
    assert found_one == found_two  # BLEU too, to the last bit
    assert all(values["bleu"] > 0 for values in found_one)

    held_out = (tmp_path / "two" / "held_out.txt").read_text().splitlines()
    assert {f"{line}?\t" in file.read_text() for line in held_out} == {True}
    found = saved_run.load(tmp_path / "two")
    bot = chat.Bot(found)
    (line,) = bot.reply("What is the gold horse?")
    assert line.startswith("the ")
    strange, answer = bot.reply("what is the zebra boat")
    assert strange == "(not in the vocabulary, read by its parts: zebra)"
    assert answer.startswith("the ")
    lines = list(bot.reply("where is the red car?", 5))
    assert len(lines) == 5
    assert lines == sorted(lines, key=lambda line: -float(line.split()[0]))
    assert list(bot.reply("   ")) == []
    assert next(bot.reply("what " * 30)) == "(the first 20 words of 30)"

    # What it is surer of than the threshold it says, and nothing else.
    sure = confidence.Confidence.load(tmp_path / "two")
    assert len(sure.others) == 8
    for threshold, expected in ((-100.0, line), (100.0, "I do not know.")):
        careful = chat.Bot(found, sure._replace(threshold=threshold))
        (line,) = careful.reply("What is the gold horse?")
        assert line.startswith(expected)
    assert "I do not know." in said
    assert "of 40 questions about other things" in said

    monkeypatch.setattr(sys, "argv", ["chat.py", str(tmp_path / "two"), "--beam", "2", "--always"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nwhat is the red lamp?\n"))
    capsys.readouterr()
    chat.main()
    question, *printed = capsys.readouterr().out.strip().splitlines()
    assert question == "> what is the red lamp?"
    assert [float(line.split()[0]) < 0 for line in printed] == [True, True]

    # The exported programs say the same, and a table has a row for each line.
    monkeypatch.setattr(export, "LONGEST", 16)  # pieces, each of which is to be traced
    monkeypatch.setattr(sys, "argv", ["export.py", str(tmp_path / "two")])
    export.main()
    count = 1 + len(held_out)
    assert f"{count} questions answered word for word" in capsys.readouterr().out
    tables = []
    for options_ in (["--table"], ["--table", "--exported"]):
        monkeypatch.setattr(sys, "argv", ["chat.py", str(tmp_path / "two"), *options_])
        monkeypatch.setattr(sys, "stdin", io.StringIO("what is the red lamp?\n\nhow is it?\n"))
        chat.main()
        tables.append(capsys.readouterr().out.splitlines())
    assert tables[0] == tables[1]
    assert [line.count("|") for line in tables[0]] == [5] * 4
    assert tables[0][2].startswith("| what is the red lamp? |")


def learnt(tmp_path: Path, source: str, language: str, *more: str) -> tuple[int, str]:
    """The end of a run on a data set that is shipped or cached, and what it said."""
    places = {"chatterbot": f"chatterbot/{chatterbot.FOLDERS[language]}", "riddles": "riddles"}
    if source in places and not (cache_dir() / places[source]).exists():
        pytest.skip(f"{source} is not cached")
    command = ["run", "--devices", "cpu", "--workers", "1", "--engine", "towers"]
    command += ["--run-dir", str(tmp_path / "run"), str(FOLDER / "train.py"), "--data", source]
    code, out, err = WARM.run([*command, "--language", language, *more], os.environ, 560)
    return code, out + err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "language", "least"),
    [("small_talk", "zh", 0.84), ("small_talk", "en", 0.84), ("chatterbot", "zh", 0.87)],
)
def test_a_data_set_is_learnt_to_its_own_target(
    source: str, language: str, least: float, tmp_path: Path
) -> None:
    """By its recipe: both are learnt by heart."""
    code, said = learnt(tmp_path, source, language)
    assert code == 0, said
    assert f"of the training set, target at least {least}" in said
    bot = chat.Bot(saved_run.load(tmp_path / "run"))
    expected = {
        "zh": {"你好": "你好，很高兴和你聊天。", "你是谁": "我是一个聊天机器人。"},
        "en": {"hello": "hello, it is nice to talk to you.", "who are you": "i am a chatbot."},
    }
    if source == "small_talk":
        for asked, answer in expected[language].items():
            for mark in ("", "?", "？！"):  # whether they are written or not
                assert list(bot.reply(asked + mark)) == [answer]


@pytest.mark.slow
def test_two_part_sayings_are_learnt_in_short_to_a_target_that_is_as_short(tmp_path: Path) -> None:
    """A sixth of its recipe's updates, which reach what the targets of this test are."""
    short = ("--steps", "600", "--units", "96", "--target", "unigram=0.5", "--target", "others=1")
    code, said = learnt(tmp_path, "riddles", "zh", *short)
    assert code == 0, said
    assert "target at most 0.5" in said


@pytest.mark.slow
def test_a_run_that_misses_its_target_or_its_data_ends_with_an_error(
    file: Path, tmp_path: Path
) -> None:
    one = ("--workers", "1", "--engine", "towers")
    code, said = run(tmp_path, "short", "--data", str(file), "--steps", "2", options=one)
    assert code == 1
    assert "target at most 0.25" in said
    resumed = ("--steps", "2", "--target", "unigram=", "--target", "others=1.5")
    code, said = run(tmp_path, "short", "--data", str(file), *resumed, options=one)
    assert code == 0, said
    assert "at most 1.5" in said
    assert "target at most 0.25" not in said
    with file.open("a") as pairs_file:
        pairs_file.write("what is that?\n")
    code, said = run(tmp_path, "bad", "--data", str(file), "--steps", "2", options=one)
    assert code == 2
    assert f"{file}, line 271: got no answer (no tab), expected question, tab, answer" in said


def test_the_program_for_one_device_trains_saves_and_compares(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with file.open("a") as pairs_file:
        pairs_file.write("what is that?\n")
    small = ["--language", "en", "--units", "16", "--layers", "1", "--steps", "12", "--skip-bad"]
    arguments = ["--data", str(file), *small, "--run-dir", str(tmp_path / "single")]
    monkeypatch.setattr(sys, "argv", ["single.py", *arguments])
    monkeypatch.setenv("QUORATE_DATA", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as ended:
        single.main()
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "1 of 271 lines skipped: 1 no answer (no tab); first line 271" in said
    assert "of a unigram model" in said
    bot = chat.Bot(
        saved_run.load(tmp_path / "single"), confidence.Confidence.load(tmp_path / "single")
    )
    assert next(bot.reply("what is the red car?"))


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got FileNotFoundError"):
        saved_run.load(tmp_path)
    (tmp_path / "network.json").write_text("{")
    with pytest.raises(DataError, match="name the directory of a run"):
        saved_run.load(tmp_path)
