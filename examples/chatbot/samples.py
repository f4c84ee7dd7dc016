"""Sample answers, in TensorBoard while the network is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import saved_run
import torch
from answers import beam, greedy
from data import Data, padded
from loss import Loss
from words import question_words

import quorate

MOST = 20


class Samples(quorate.Callback):
    """Writes what ``chat.py`` needs, and after each evaluation answers to held-out questions.

    Args:
        data: of the run; the first questions of its test set are asked.
        network: arguments of ``Seq2Seq``.
        no_repeat: see ``greedy``.
    """

    def __init__(self, data: Data, network: dict[str, Any], no_repeat: int) -> None:
        self._data = data
        self._network = network
        self._no_repeat = no_repeat
        self._loss = Loss(data.vocabulary, data.language)
        self._trainer: Any = None

    def started(self, trainer: Any) -> None:
        """Write what ``chat.py`` needs: in the coordinator alone, once."""
        self._trainer = trainer
        if trainer.run_dir is not None:
            saved_run.save(Path(trainer.run_dir), self._data, self._network, self._no_repeat)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:  # noqa: ARG002
        """Answer, and show it as a table."""
        summaries = self._trainer.summaries
        if summaries is None:
            return
        questions = self._data.questions[:MOST]
        asked = [question_words(question, self._data.language) for question in questions]
        model = self._trainer.model
        device = next(model.parameters()).device
        batch = padded([self._data.vocabulary.numbers(one) for one in asked]).to(device)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            plain = self._loss.texts(greedy(model, batch, no_repeat=self._no_repeat))
            best = self._loss.texts(
                [found[0].words for found in beam(model, batch, 5, no_repeat=self._no_repeat)]
            )
        model.train(was_training)
        lines = ["question | greedy | beam of 5", "--- | --- | ---"]
        lines += [" | ".join(line) for line in zip(questions, plain, best, strict=True)]
        summaries.add_text("answers", "\n".join(lines), global_step)
