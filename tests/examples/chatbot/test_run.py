"""examples/chatbot: whole runs."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from support.chatbot import FOLDER, example
from support.warm import WARM

from quorate.data import cache_dir
from quorate.errors import DataError

chat = example.chat
chatterbot = example.chatterbot
confidence = example.confidence
export = example.export
saved_run = example.saved_run
single = example.single


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
