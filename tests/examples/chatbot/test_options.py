"""examples/chatbot: options, small talk, mixed data sets."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chatbot import example

from quorate.errors import DataError, SettingError

data = example.data
options = example.options
pairs = example.pairs
small_talk = example.small_talk


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
