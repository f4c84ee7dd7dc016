"""examples/chatbot: pairs that are bad, what is learnt from, and what is kept of it."""

from __future__ import annotations

import itertools
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chatbot import example, known

from quorate.errors import DataError, SettingError

data = example.data
pairs = example.pairs
prepared = example.prepared


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


def test_a_data_set_that_is_nearly_one_of_the_known_names_it(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"data: got 'small-talk'.*did you mean small_talk\?"):
        data.load(["small-talk"], "en", vocabulary_size=500, least_answer=[1])


def test_filters_that_leave_no_pair_are_named(tmp_path: Path) -> None:
    path = tmp_path / "short.tsv"
    path.write_text("".join(f"why {n}\tno way\n" for n in range(100)))
    with pytest.raises(DataError, match=r"got 100 pairs, of which none is kept.*--least-answer 1"):
        data.load([str(path)], "en", vocabulary_size=500, least_answer=[3], say=lambda line: None)


def test_cutting_many_pairs_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "PROGRESS_S", 0.0)
    said: list[str] = []
    pairs.tokenized([pairs.Pair("who is it", "it is me") for _ in range(3)], "en", said.append)
    assert said[:2] == [f"{n} pairs are cut into words so far" for n in range(2)]


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
