"""Answers of a model: greedily, or by beam search. For a batch of questions at once.

Legend: B questions, K hypotheses of each (the beam), V pieces of the vocabulary, U words so far
(pieces of the vocabulary, that is: a word that is spelt counts as several), N rows of any kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from data import padded
from model import Read, Seq2Seq
from pairs import MOST_ANSWER
from vocabulary import BEGIN, END, PAD

BANNED = (PAD, BEGIN)  # what no answer has in it
_AT_ONCE = 100  # questions


class Answer(NamedTuple):
    """An answer, and what it scores: the higher, the better."""

    words: list[int]  # without its end
    score: float  # log-probability (its end, if it has one, included) / length ** length_penalty


@torch.no_grad()
def greedy(
    model: Seq2Seq,
    questions: torch.Tensor,
    *,
    longest: int = MOST_ANSWER,
    no_repeat: int = 0,
    banned: Sequence[int] = BANNED,
) -> list[list[int]]:
    """Answers that go on with the most probable word each time.

    Args:
        model: in evaluation mode.
        questions: (B, T) int64.
        longest: words after which an answer is cut off.
        no_repeat: so many words in a row are not said twice; 0 allows it, 1 is each word once.
        banned: numbers that are never taken.
    """
    read, state = model.read(questions)
    words = torch.full((len(questions), 1), BEGIN, device=questions.device)
    done = torch.zeros(len(questions), dtype=torch.bool, device=questions.device)
    found: list[torch.Tensor] = []
    for _ in range(longest):
        features, state = model.write(read, state, words)
        logits = _allowed(model, features, banned)
        if no_repeat:
            logits[_repeating(torch.cat(found or [words[:, :0]], 1), no_repeat, logits)] = -math.inf
        words = logits.argmax(1, keepdim=True)
        words = words.masked_fill(done[:, None], PAD)
        done = done | (words[:, 0] == END)
        found.append(words)
        if bool(done.all()):
            break
    return [_words(row) for row in torch.cat(found, 1).tolist()]


def answered(model: Seq2Seq, questions: Sequence[Sequence[int]], no_repeat: int) -> list[list[int]]:
    """Greedy answers to any number of questions, each its numbers, in evaluation mode."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found: list[list[int]] = []
    with torch.no_grad():
        for start in range(0, len(questions), _AT_ONCE):
            batch = padded(questions[start : start + _AT_ONCE]).to(device)
            found += greedy(model, batch, no_repeat=no_repeat)
    model.train(was_training)
    return found


@torch.no_grad()
def beam(
    model: Seq2Seq,
    questions: torch.Tensor,
    size: int,
    *,
    longest: int = MOST_ANSWER,
    no_repeat: int = 0,
    length_penalty: float = 1.0,
    banned: Sequence[int] = BANNED,
) -> list[list[Answer]]:
    """The best answers that a beam search finds, best first: K for each question.

    All hypotheses of all questions go through the network together. One that has ended stays in the
    beam with the score that it has, until K others are better or all have ended.

    Args:
        model: in evaluation mode.
        questions: (B, T) int64.
        size: K. With K of 1 it finds what ``greedy`` finds.
        longest: words after which an answer is cut off.
        no_repeat: see ``greedy``.
        length_penalty: 0 prefers short answers, 1 compares means per word (Wu et al. 2016 has a
            curve in between).
        banned: numbers that are never taken.
    """
    count, device = len(questions), questions.device
    read, state = model.read(questions)
    read = Read(*(part.repeat_interleave(size, 0) for part in read))
    state = (state[0].repeat_interleave(size, 1), state[1].repeat_interleave(size, 1))
    words = torch.full((count * size, 1), BEGIN, device=device)
    history = torch.empty((count, size, 0), dtype=torch.int64, device=device)  # (B, K, U)
    sums = torch.full((count, size), -math.inf, device=device)  # log-probabilities
    sums[:, 0] = 0  # the others are not there yet
    lengths = torch.zeros((count, size), device=device)
    done = torch.zeros((count, size), dtype=torch.bool, device=device)
    scores = sums
    first = torch.arange(count, device=device)[:, None] * size  # of each question
    for _ in range(longest):
        features, state = model.write(read, state, words)
        log = _allowed(model, features, banned).log_softmax(1)
        if no_repeat:  # probabilities stay the network's: what is left does not become likelier
            log[_repeating(history.flatten(0, 1), no_repeat, log)] = -math.inf
        log = log.view(count, size, -1)
        vocabulary = log.shape[2]
        # What has ended goes on in one way, at no cost.
        ended = torch.full((vocabulary,), -math.inf, device=device)
        ended[PAD] = 0
        grown = sums[..., None] + torch.where(done[..., None], ended, log)
        lengths = lengths + ~done
        scores, places = (grown / lengths[..., None] ** length_penalty).flatten(1).topk(size)
        parents, words = places // vocabulary, places % vocabulary  # (B, K)
        sums = grown.flatten(1).gather(1, places)
        lengths = lengths.gather(1, parents)
        done = done.gather(1, parents) | (words == END)
        history = history.gather(1, parents[..., None].expand_as(history))
        history = torch.cat([history, words[..., None]], 2)
        if bool(done.all()):
            break
        rows = (first + parents).flatten()
        state = (state[0][:, rows], state[1][:, rows])
        words = words.reshape(-1, 1)
    return [
        [Answer(_words(words), score) for words, score in zip(*one, strict=True)]
        for one in zip(history.tolist(), scores.tolist(), strict=True)
    ]


def _allowed(model: Seq2Seq, features: torch.Tensor, banned: Sequence[int]) -> torch.Tensor:
    """Logits (N, V) of features (N, 1, H)."""
    logits = model.logits(features[:, 0])
    logits[:, list(banned)] = -math.inf
    return logits


def _repeating(history: torch.Tensor, size: int, logits: torch.Tensor) -> torch.Tensor:
    """What would end ``size`` words that were said before in a row, (N, V) bool.

    Paulus et al. 2018 block trigrams of summaries so.

    Args:
        history: (N, U) int64.
        size: of an n-gram.
        logits: (N, V), for their shape and device.
    """
    if history.shape[1] < size:
        return torch.zeros_like(logits, dtype=torch.bool)
    said = history.unfold(1, size, 1)  # (N, U - size + 1, size)
    last = history[:, history.shape[1] - size + 1 :]
    same = (said[..., :-1] == last[:, None]).all(2)
    # Counted, not set: of two n-grams that end alike only one may be there again.
    times = torch.zeros_like(logits, dtype=torch.int64).scatter_add_(1, said[..., -1], same.long())
    times[:, END] = 0
    return times > 0


def _words(numbers: list[int]) -> list[int]:
    """What is before the end."""
    return numbers[: numbers.index(END)] if END in numbers else numbers
