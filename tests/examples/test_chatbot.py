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
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sacrebleu.metrics import BLEU
from support.warm import WARM

import quorate
from quorate.errors import DataError

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
    answers, bleu, buckets, chat, data, loss, model = map(
        importlib.import_module,
        ("answers", "bleu", "buckets", "chat", "data", "loss", "model"),
    )
    pairs, prepared, saved_run, single, vocabulary, words = map(
        importlib.import_module,
        ("pairs", "prepared", "saved_run", "single", "vocabulary", "words"),
    )


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


def random_rows(count: int, size: int, seed: int = 0) -> list[Any]:
    draw = random.Random(seed)
    return [
        data.Row(
            draw.choices(range(4, size), k=draw.randint(1, 9)),
            [2, *draw.choices(range(4, size), k=draw.randint(3, 12)), 3],
            "a b",
        )
        for _ in range(count)
    ]


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


def test_the_first_sentence() -> None:
    assert words.first_sentence(" 是的。这是真的。", "zh") == "是的。"
    assert words.first_sentence("It costs 1.50 a day. Most pay it.", "en") == "It costs 1.50 a day."
    assert words.first_sentence("no end", "en") == "no end"


def test_a_vocabulary_keeps_the_most_frequent_words_and_its_file(tmp_path: Path) -> None:
    made = vocabulary.Vocabulary.of([["b", "a", "c"], ["c", "b", "d"]], 7)
    assert made.words(range(7)) == [*vocabulary.SPECIAL, "b", "c", "a"]  # a before d
    assert made.numbers(["c", "d", "?"]) == [5, vocabulary.UNKNOWN, vocabulary.UNKNOWN]
    assert made.unknown(["c", "d", "?"]) == ["d", "?"]
    path = tmp_path / "vocabulary.txt"
    made.save(path)
    assert vocabulary.Vocabulary.load(path) == made
    whole = path.read_text()
    for text, wrong in (
        (whole[:-1], "a last line without end"),
        (whole + "\n", "line 8: got no word"),
        (whole + "b\n", "line 8: got 'b', as in line 5"),
        (whole.removeprefix("<pad>\n"), "line 1: got "),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=wrong):
            vocabulary.Vocabulary.load(path)
    with pytest.raises(DataError, match="expected a word per line"):
        vocabulary.Vocabulary.load(tmp_path / "none.txt")


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
    assert found[0] == (["what", "is", "it", "?"], ["it", "is", "this", "."])
    assert found[1:] == [(["why", str(n)], ["who", "knows", "that", "?"]) for n in range(10)]
    assert said == [
        "26 pairs, 11 kept; 1 there twice, 1 with a question of more than 20 words, 1 with an "
        "answer of fewer than 3 words, 1 with an answer of more than 30 words, 11 with an answer "
        "that more than 10 questions have"
    ]


def test_prepared_pairs_are_made_once_and_again_if_damaged(tmp_path: Path) -> None:
    made = [pairs.Tokens(["什么"], ["是", "的", "。"]), pairs.Tokens(["a", "b"], ["c", "d", "e"])]
    calls: list[int] = []
    said: list[str] = []

    def make() -> list[Any]:
        calls.append(1)
        return made

    for _ in range(2):
        assert prepared.prepared(tmp_path, "x", ["1"], make, said.append) == made
    assert (len(calls), said) == (1, [])
    prepared.prepared(tmp_path, "x", ["2"], make, said.append)
    assert len(calls) == 2
    (path, _) = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for damage in (path.read_bytes()[:-3], b"", path.read_bytes().replace(b"a", b"b")):
        path.write_bytes(damage)
        assert prepared.prepared(tmp_path, "x", ["1"], make, said.append) == made
        assert said.pop() == f"{path} is damaged: making it again"
        assert not said


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
    network, rows = seq2seq(size=30, units=16), random_rows(12, 30)
    narrow = data.collate(rows)
    wide = data.Batch(
        data.padded([row.question for row in rows], 25),
        data.padded([row.answer for row in rows], 40),
        narrow.references,
    )
    assert wide.questions.shape == (12, 25)
    assert wide.answers.shape == (12, 40)
    mean = loss.Loss(vocabulary.Vocabulary([*vocabulary.SPECIAL, *map(str, range(26))]), "en")
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
    scribbled.questions[0, 0] = 5 + (scribbled.questions[0, 0] == 5)
    assert mean(network, scribbled)["loss"].item() != pytest.approx(one["loss"].item(), abs=1e-4)


def test_shards_weighted_by_words_are_the_whole_batch() -> None:
    network, rows = seq2seq(size=30, units=16), random_rows(12, 30)
    mean = loss.Loss(vocabulary.Vocabulary([*vocabulary.SPECIAL, *map(str, range(26))]), "en")
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
    """All answers of at most four words that there are with V = 8, by brute force.

    Each with its log-probability and its length, the end included.
    """
    for length in range(1, LONGEST + 1):
        sequences = [
            sequence
            for sequence in itertools.product(range(3, 8), repeat=length)
            if 3 not in sequence[:-1] and (sequence[-1] == 3 or length == LONGEST)
        ]
        words = torch.tensor(sequences)
        read, state = network.read(question.expand(len(words), -1))
        before = torch.cat([torch.full((len(words), 1), 2), words[:, :-1]], 1)
        features, _ = network.write(read, state, before)
        logits = network.logits(features)
        logits[:, :, [0, 1, 2]] = float("-inf")
        sums = logits.log_softmax(2).gather(2, words[..., None]).sum((1, 2))
        for sequence, total in zip(sequences, sums.tolist(), strict=True):
            yield [word for word in sequence if word != 3], total, length


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_a_beam_as_wide_as_there_are_answers_is_an_exhaustive_search(penalty: float) -> None:
    network = seq2seq(seed=3)
    question = torch.tensor([[4, 7, 5]])
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
    assert not {0, 1, 2} & {word for words in distinct for word in words}


def test_questions_are_answered_together_as_they_are_alone() -> None:
    network = seq2seq(size=20, units=12, seed=1)
    rows = random_rows(16, 20)
    together = answers.beam(network, data.collate(rows).questions, 4, longest=10)
    for row, found in zip(rows, together, strict=True):
        (alone,) = answers.beam(network, torch.tensor([row.question]), 4, longest=10)
        assert [answer.words for answer in found] == [answer.words for answer in alone]
        assert [a.score for a in found] == pytest.approx([a.score for a in alone], abs=1e-4)
        assert [a.score for a in found] == sorted((a.score for a in found), reverse=True)


def test_a_beam_takes_no_longer_than_its_hypotheses_one_by_one() -> None:
    network = seq2seq(size=2000, units=96)
    questions = data.collate(random_rows(12, 2000)).questions
    banned = [0, 1, 2, 3]  # without an end both take as many steps

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


def test_bleu_and_loss_are_the_same_bits_on_one_two_and_three_workers() -> None:
    rows = random_rows(30, 20)
    known = vocabulary.Vocabulary([*vocabulary.SPECIAL, *"abcdefghijklmnop"])
    rows = [row._replace(reference=" ".join(known.words(row.answer[1:-1]))) for row in rows]
    found = []
    for workers in (1, 2, 3):
        trainer = quorate.Trainer(
            lambda: seq2seq(size=20, units=12),
            loss.Loss(known, "en"),
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
    network = seq2seq(size=20, units=12)
    said = [
        " ".join(known.words(numbers))
        for numbers in answers.greedy(network, data.collate(rows).questions)
    ]
    expected = BLEU().corpus_score(said, [[row.reference for row in rows]]).score
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
    assert {f"{line}\t" in file.read_text() for line in held_out} == {True}
    found = saved_run.load(tmp_path / "two")
    (line,) = chat.reply(found, "What is the gold horse?")
    assert line.startswith("the ")
    strange, answer = chat.reply(found, "what is the zebra boat")
    assert strange == "(not in the vocabulary: zebra)"
    assert answer.startswith("the ")
    lines = list(chat.reply(found, "where is the red car?", 5))
    assert len(lines) == 5
    assert lines == sorted(lines, key=lambda line: -float(line.split()[0]))
    assert list(chat.reply(found, "   ")) == []
    assert next(chat.reply(found, "what " * 30)) == "(the first 20 words of 30)"

    monkeypatch.setattr(sys, "argv", ["chat.py", str(tmp_path / "two"), "--beam", "2"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nwhat is the red lamp?\n"))
    capsys.readouterr()
    chat.main()
    question, *printed = capsys.readouterr().out.strip().splitlines()
    assert question == "> what is the red lamp?"
    assert [float(line.split()[0]) < 0 for line in printed] == [True, True]


@pytest.mark.slow
def test_a_run_that_misses_its_target_or_its_data_ends_with_an_error(
    file: Path, tmp_path: Path
) -> None:
    one = ("--workers", "1", "--engine", "towers")
    code, said = run(tmp_path, "short", "--data", str(file), "--steps", "2", options=one)
    assert code == 1
    assert "target 0.25" in said
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
    assert next(chat.reply(saved_run.load(tmp_path / "single"), "what is the red car?"))


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got FileNotFoundError"):
        saved_run.load(tmp_path)
    (tmp_path / "network.json").write_text("{")
    with pytest.raises(DataError, match="name the directory of a run"):
        saved_run.load(tmp_path)
