"""The target: what a network has to know of answers, and of what questions have to do with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from data import Data, Pairs

UNIGRAM, OTHERS = 0.25, 0.90  # the most that the perplexity may be of the two it is compared with


def reached(evaluate: Callable[[Pairs], dict[str, float]], data: Data) -> bool:
    """Compare perplexities of the answers to questions that were never seen, and say them.

    Args:
        evaluate: from a dataset to the means of the loss function.
        data: its test set counts.

    Returns:
        Whether the perplexity is at most a quarter of that of a unigram model, which knows how
        frequent each word is and no more, and at most nine tenths of its own with the questions of
        other answers: a network that does not listen has the same.
    """
    own, others = evaluate(data.test), evaluate(data.test.with_other_questions())
    found, without = math.exp(own["loss"]), unigram_perplexity(data.train, data.test, data)
    shuffled = math.exp(others["loss"])
    print(f"test perplexity {found:.2f}, BLEU {own['bleu']:.2f}")
    print(f"  of a unigram model {without:.2f}: {found / without:.3f} of it, target {UNIGRAM}")
    print(f"  with other questions {shuffled:.2f}: {found / shuffled:.3f} of it, target {OTHERS}")
    print(f"  BLEU with other questions {others['bleu']:.2f}")
    return found <= UNIGRAM * without and found <= OTHERS * shuffled


def unigram_perplexity(train: Pairs, test: Pairs, data: Data) -> float:
    """Of the test set's answers under the frequencies of words in the training set's.

    Over the same vocabulary, ends and unknown words as the network's; each count is one more than
    it is, so that none is zero.
    """
    counts = Counter(number for row in train for number in row.answer[1:])
    total = counts.total() + len(data.vocabulary)
    logs = [math.log((counts[number] + 1) / total) for row in test for number in row.answer[1:]]
    return math.exp(-sum(logs) / len(logs))
