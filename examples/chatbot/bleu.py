"""BLEU (Papineni et al. 2002) by sacrebleu, from counts that shards can add up.

A mean over shards' BLEU is not the BLEU of them all. Numbers of n-grams are integers: their sum is
the same on any number of workers, and BLEU is made of it once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sacrebleu.metrics import BLEU

ORDER = 4
TOKENIZERS = {"zh": "zh", "en": "13a"}  # "zh" takes each Chinese character as a word


def counts(answers: Sequence[str], references: Sequence[str], language: str) -> torch.Tensor:
    """What BLEU is made of, (10,) int64: n-grams that match, n-grams, words, words of references.

    Args:
        answers: texts.
        references: of each a text.
        language: "zh" or "en".
    """
    score = BLEU(tokenize=TOKENIZERS[language]).corpus_score(list(answers), [list(references)])
    return torch.tensor([*score.counts, *score.totals, score.sys_len, score.ref_len])


def finish(total: torch.Tensor) -> float:
    """BLEU, from 0 to 100, of counts (10,)."""
    *numbers, words, words_of_references = total.tolist()
    found = BLEU.compute_bleu(
        numbers[:ORDER],
        numbers[ORDER:],
        words,
        words_of_references,
        smooth_method="exp",  # sacrebleu's default
    )
    return float(found.score)
