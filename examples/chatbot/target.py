"""The targets: what a network has to know of answers, and what questions have to do with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from answers import answered
from data import Data, Pairs
from model import Seq2Seq
from recipes import OTHERS, RECALLED, UNIGRAM

_MOST_ASKED = 500  # questions of the training set


def reached(
    evaluate: Callable[[Pairs], dict[str, float]],
    model: Seq2Seq,
    data: Data,
    targets: Mapping[str, float],
    no_repeat: int,
) -> bool:
    """Measure the three, say them, and compare those that have a target.

    "unigram" is the perplexity of answers to questions that were never seen, as a share of that of
    a unigram model, which knows how frequent each word is and no more: at most so much. "others" is
    it as a share of its own with the questions of other answers: a network that does not listen
    has 1. "recalled" is the share of questions of the training set to which greedy search gives an
    answer that they have there, to the letter: at least so much. It is what small talk is about.

    Args:
        evaluate: from a dataset to the means of the loss function.
        model: that is evaluated.
        data: its test set counts.
        targets: by name.
        no_repeat: see ``greedy``.
    """
    own, others = evaluate(data.test), evaluate(data.test.with_other_questions())
    found, without = math.exp(own["loss"]), unigram_perplexity(data)
    shuffled = math.exp(others["loss"])
    recalled, asked = recall(model, data.train, no_repeat)
    print(f"test perplexity {found:.2f}, BLEU {own['bleu']:.2f}")
    print(
        f"  of a unigram model {without:.2f}: {found / without:.3f} of it"
        f"{_bound(targets, UNIGRAM, 'at most')}"
    )
    print(
        f"  with other questions {shuffled:.2f}: {found / shuffled:.3f} of it"
        f"{_bound(targets, OTHERS, 'at most')}"
    )
    print(f"  BLEU with other questions {others['bleu']:.2f}")
    print(
        f"  answers recalled: {recalled:.3f} of {asked:,} questions of the training set"
        f"{_bound(targets, RECALLED, 'at least')}"
    )
    return (
        found <= targets.get(UNIGRAM, math.inf) * without
        and found <= targets.get(OTHERS, math.inf) * shuffled
        and recalled >= targets.get(RECALLED, 0)
    )


def recall(model: Seq2Seq, pairs: Pairs, no_repeat: int) -> tuple[float, int]:
    """The share of questions that are answered as they are in the pairs, and of how many."""
    each = pairs.each_question()
    each = each[:: max(1, len(each) // _MOST_ASKED)]
    said = answered(model, [question for question, _ in each], no_repeat)
    right = sum(words in known for words, (_, known) in zip(said, each, strict=True))
    return right / len(each), len(each)


def unigram_perplexity(data: Data) -> float:
    """Of the test set's answers under the frequencies of words in the training set's.

    Over the same vocabulary and ends as the network's; each count is one more than it is, so that
    none is zero.
    """
    counts = Counter(number for row in data.train for number in row.answer[1:].tolist())
    total = counts.total() + len(data.vocabulary)
    logs = [
        math.log((counts[number] + 1) / total)
        for row in data.test
        for number in row.answer[1:].tolist()
    ]
    return math.exp(-sum(logs) / len(logs))


def _bound(targets: Mapping[str, float], name: str, kind: str) -> str:
    return f", target {kind} {targets[name]}" if name in targets else ""
