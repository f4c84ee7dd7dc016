"""examples/chatbot: padding and shards change nothing; BLEU over shards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from sacrebleu.metrics import BLEU
from support.chatbot import BASE, example, known, random_rows, seq2seq

import quorate

answers = example.answers
bleu = example.bleu
buckets = example.buckets
data = example.data
loss = example.loss


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
