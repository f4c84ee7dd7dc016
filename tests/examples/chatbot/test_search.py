"""examples/chatbot: greedy and beam search.

Legend: B rows, T words of a question, U of an answer, V words of the vocabulary, K hypotheses.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.chatbot import example, random_rows, seq2seq

answers = example.answers
data = example.data


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
