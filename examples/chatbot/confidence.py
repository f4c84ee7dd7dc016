"""How sure a network is of its answer, and below what it says that it does not know.

The probability of an answer says little: "it depends on your policy" is likely whatever was asked.
So it is compared with the probability of the same answer after other questions (pointwise mutual
information, as Li et al. 2016 rank answers by it): a network that has not understood a question
answers what it would have answered to many.

Legend: B questions, K other questions, U words of an answer with its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from answers import answered
from data import Data, Pairs, padded
from model import Seq2Seq
from vocabulary import BEGIN, END, PAD
from whole import write_whole
from words import question_words

from quorate.errors import DataError

FILE = "confidence.json"
UNKNOWN = {"zh": "我不知道。", "en": "I do not know."}
FOREIGN = {
    language: Path(__file__).with_name(f"foreign.{language}.txt") for language in ("zh", "en")
}

_OTHERS = 8  # K
_MOST_ASKED = 400
_AT_ONCE = 32


class Confidence(NamedTuple):
    """What a run knows of its own confidence."""

    threshold: float  # nats per word
    others: list[list[int]]  # K questions of the validation set

    def save(self, run_dir: Path) -> None:
        """Write it, all or nothing."""
        write_whole(run_dir / FILE, json.dumps(self._asdict()))

    @classmethod
    def load(cls, run_dir: Path) -> Confidence:
        """Read what ``save`` wrote.

        Raises:
            DataError: it is not there, or damaged.
        """
        try:
            found = json.loads((run_dir / FILE).read_text())
            return cls(float(found["threshold"]), [[*map(int, q)] for q in found["others"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                run_dir / FILE,
                got=f"{type(error).__name__}: {error}",
                expected="what train.py writes at its end",
                fix="train to the end, or pass --always",
            ) from error

    def of(
        self, model: Seq2Seq, questions: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[float]:
        """How sure the network is of answers: nats per word, above 0 if it heard the question."""
        return confidences(model, questions, answers, self.others)


@torch.no_grad()
def confidences(
    model: Seq2Seq,
    questions: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> list[float]:
    """Of each answer log p(answer | question) - log (mean over others of p(answer | other)), / U.

    Args:
        model: in evaluation mode.
        questions: B.
        answers: B, without begin and end.
        others: K questions.
    """
    found: list[float] = []
    for start in range(0, len(questions), _AT_ONCE):
        asked, said = questions[start : start + _AT_ONCE], answers[start : start + _AT_ONCE]
        own = _log_probabilities(model, asked, said)  # (B,)
        crossed = _log_probabilities(
            model,
            [other for _ in said for other in others],
            [answer for answer in said for _ in others],
        ).view(len(said), len(others))
        without = crossed.logsumexp(1) - math.log(len(others))
        lengths = torch.tensor([len(answer) + 1 for answer in said])
        found += ((own - without) / lengths).tolist()
    return found


def _log_probabilities(
    model: Seq2Seq, questions: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Log-probabilities of answers, with their ends, (B,) float32 on the CPU."""
    device = next(model.parameters()).device
    said = padded([[BEGIN, *answer, END] for answer in answers]).to(device)
    features = model(padded(questions).to(device), said[:, :-1])
    logs = model.logits(features).log_softmax(2)
    own = logs.gather(2, said[:, 1:, None])[..., 0]
    return own.masked_fill(said[:, 1:] == PAD, 0).sum(1).cpu()


def calibrated(model: Seq2Seq, data: Data, declined: float, no_repeat: int) -> Confidence:
    """Choose the threshold, and say what comes of it.

    It is the quantile of the validation set's questions: so many of them are declined. What it does
    to the test set's, and to questions about other things, was not looked at in choosing it, and is
    said.

    Args:
        model: that was trained.
        data: of the run.
        declined: the share of the validation set's questions, from 0 to 1.
        no_repeat: see ``greedy``.
    """
    was_training = model.training
    model.eval()
    asked = _some(data.validation)
    others = asked[:: max(1, len(asked) // _OTHERS)][:_OTHERS]
    own = _sureness(model, asked, others, no_repeat)
    threshold = float(np.quantile(own, declined))
    foreign = [
        data.vocabulary.numbers(question_words(line, data.language)) for line in _foreign(data)
    ]
    sure = {
        "of the test set's": _sureness(model, _some(data.test), others, no_repeat),
        "about other things": _sureness(model, foreign, others, no_repeat),
    }
    print(f"says {UNKNOWN[data.language]} below {threshold:.3f} nats per word")
    for name, values in {"of the validation set's, by choice": own, **sure}.items():
        below = float(np.mean(np.array(values) < threshold))
        print(f"  to {below:.1%} of {len(values)} questions {name}")
    model.train(was_training)
    return Confidence(threshold, others)


def _sureness(
    model: Seq2Seq, asked: list[list[int]], others: list[list[int]], no_repeat: int
) -> list[float]:
    return confidences(model, asked, answered(model, asked, no_repeat), others)


def _some(pairs: Pairs) -> list[list[int]]:
    """Questions, at most so many, of all lengths of answers."""
    asked = [question for question, _ in pairs.each_question()]
    return asked[:: -(-len(asked) // _MOST_ASKED)]


def _foreign(data: Data) -> list[str]:
    return FOREIGN[data.language].read_text(encoding="utf-8").splitlines()
