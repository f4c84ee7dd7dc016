"""The loss: cross entropy per word, so that neither padding nor shards change it."""

from __future__ import annotations

from typing import Any

import bleu
import torch
import torch.nn.functional as F
from answers import greedy
from data import Batch
from model import Seq2Seq
from vocabulary import END, PAD, Vocabulary
from words import text


class Loss:
    """``loss(model, batch)``.

    Args:
        vocabulary: of the answers.
        language: likewise.
        no_repeat: see ``greedy``.
    """

    def __init__(self, vocabulary: Vocabulary, language: str, no_repeat: int = 0) -> None:
        self._vocabulary = vocabulary
        self._language = language
        self._no_repeat = no_repeat

    def __call__(self, model: Seq2Seq, batch: Batch) -> dict[str, Any]:
        """Means over the words of the answers, each with its end, and how many these are.

        A shard's weight is its number of words: a shard of long answers weighs more than one of
        short ones, as its words do in the whole batch. In evaluation mode also BLEU's counts.
        """
        wanted = batch.answers[:, 1:]
        real = wanted != PAD
        features = model(batch.questions, batch.answers[:, :-1])
        logits = model.logits(features[real])  # (words, V): of real words alone
        found = {
            "loss": F.cross_entropy(logits, wanted[real]),
            "word_accuracy": (logits.argmax(1) == wanted[real]).float().mean(),
            "weight": torch.count_nonzero(real),
        }
        if not model.training:
            said = self.texts(greedy(model, batch.questions, no_repeat=self._no_repeat))
            # Pieces spell every word: a reference is what its numbers say.
            wanted_texts = self.texts([row[row > END].tolist() for row in batch.answers])
            found["bleu"] = bleu.counts(said, wanted_texts, self._language)
        return found

    def texts(self, answers: list[list[int]]) -> list[str]:
        """Answers as a person writes them."""
        return [text(self._vocabulary.words(numbers), self._language) for numbers in answers]
