"""examples/chatbot: letters, attention, confidence, export."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.chatbot import example, known, random_rows, seq2seq

import quorate
from quorate.errors import DataError

confidence = example.confidence
data = example.data
export = example.export
saved_run = example.saved_run


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
