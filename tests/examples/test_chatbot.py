"""examples/chatbot: exactness over shards, search, data, and conversations with runs."""

import io
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU
from support import example_data
from support.example_modules import EXAMPLES, example_modules
from support.warm import WARM

FOLDER = EXAMPLES / "chatbot"
pytestmark = pytest.mark.usefixtures("one_thread")  # the networks are too small for more

with example_modules(FOLDER) as example:
    answers, bleu, chat, data = example.answers, example.bleu, example.chat, example.data
    confidence, export, model = example.confidence, example.export, example.model
    saved_run, vocabulary = example.saved_run, example.vocabulary
BASE = len(vocabulary.BASE)  # pieces of every vocabulary


def seq2seq(size: int, units: int) -> Any:
    """A network of large random weights, whose answers differ."""
    torch.manual_seed(0)
    made = model.Seq2Seq(size, units=units)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.6)
    return made.eval()


def random_rows(count: int, size: int) -> list[Any]:
    draw = random.Random(0)

    def some(least: int, most: int) -> list[int]:
        return draw.choices(range(BASE, size), k=draw.randint(least, most))

    return [
        data.Row(*map(torch.tensor, (some(1, 9), some(2, 20), [1, *some(3, 12), 2])))
        for _ in range(count)
    ]


# --- batches and the loss -------------------------------------------------------------------------


def test_padding_and_shards_change_nothing() -> None:
    size = BASE + 26
    network, rows = seq2seq(size, 16), random_rows(12, size)
    words = vocabulary.Vocabulary([*vocabulary.BASE, *(f"w{n}" for n in range(26))])
    mean = example.loss.Loss(words, "en")
    narrow = data.collate(rows)
    wide = data.Batch(
        data.padded([row.question for row in rows], 25),
        narrow.letters,
        data.padded([row.answer for row in rows], 40),
    )
    one, other = (mean(network, batch) for batch in (narrow, wide))
    gradients = [
        torch.autograd.grad(values["loss"], [*network.parameters()]) for values in (one, other)
    ]
    assert one["loss"].item() == pytest.approx(other["loss"].item(), abs=2e-6)
    assert one["weight"] == other["weight"] == sum(len(row.answer) - 1 for row in rows)
    assert torch.equal(one["bleu"], other["bleu"])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    # Shards weighted by words are the whole batch; a mean of means is not.
    for shards in (2, 3, 5):
        parts = [
            mean(network, data.collate(rows[s * 12 // shards : (s + 1) * 12 // shards]))
            for s in range(shards)
        ]
        losses = [float(part["loss"].detach()) for part in parts]
        weights = [int(part["weight"]) for part in parts]
        assert sum(weights) == int(one["weight"])
        assert np.average(losses, weights=weights) == pytest.approx(one["loss"].item(), abs=2e-6)
        assert abs(np.mean(losses) - one["loss"].item()) > 1e-4
        assert torch.equal(sum(part["bleu"] for part in parts), one["bleu"])


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


# --- data -----------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1), max_size=8))
def test_no_text_has_a_word_without_a_number(said: list[str]) -> None:
    made = vocabulary.Vocabulary([*vocabulary.BASE, "保", "险", "保险", "é", "ab"])
    for numbers in (made.numbers(said), made.letters(said)):
        assert all(2 < number < len(made) for number in numbers)
        assert "".join(made.words(numbers)) == "".join(said)


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_can_be_talked_to_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example_data.pairs(tmp_path)
    file, run_dir = tmp_path / "pairs.tsv", tmp_path / "run"
    small = ("--language", "en", "--units", "32", "--layers", "1", "--batch-size", "24")
    learn = ("--lr", "0.01", "--epochs", "5", "--target", "unigram=0.9", "--target", "others=1")
    options = ("--devices", "cpu", "--engine", "towers", "--workers", "1")
    words = ["run", *options, "--run-dir", str(run_dir), str(FOLDER / "train.py")]
    env = {**os.environ, "QUORATE_DATA": str(tmp_path / "cache")}
    code, out, err = WARM.run([*words, "--data", str(file), *small, *learn], env, 560)
    said = out + err
    assert code == 0, said
    assert "I do not know." in said
    assert "of 40 questions about other things" in said
    held_out = (run_dir / "held_out.txt").read_text().splitlines()
    assert {f"{line}?\t" in file.read_text() for line in held_out} == {True}
    found = saved_run.load(run_dir)
    bot = chat.Bot(found)
    (line,) = bot.reply("What is the gold horse?")
    assert line.startswith("the ")
    strange, answer = bot.reply("what is the zebra boat")
    assert strange == "(not in the vocabulary, read by its parts: zebra)"
    assert answer.startswith("the ")
    lines = [*bot.reply("where is the red car?", 5)]
    assert len(lines) == 5
    assert lines == sorted(lines, key=lambda line: -float(line.split()[0]))
    assert [*bot.reply("   ")] == []
    assert next(bot.reply("what " * 30)) == "(the first 20 words of 30)"
    # The exported programs say the same, and a table has a row for each line.
    monkeypatch.setattr(export, "LONGEST", 16)  # pieces, each traced

    def printed(program: Any, *words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["program", str(run_dir), *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO("what is the red lamp?\n\nhow is it?\n"))
        capsys.readouterr()
        program.main()
        return capsys.readouterr().out.strip().splitlines()

    answered = f"{1 + len(held_out)} questions answered word for word"
    assert answered in "\n".join(printed(export))
    table, exported = (printed(chat, "--table", *more) for more in ((), ("--exported",)))
    assert table == exported
    assert [line.count("|") for line in table] == [5] * 4
    assert printed(chat, "--beam", "2", "--always")[0] == "> what is the red lamp?"
