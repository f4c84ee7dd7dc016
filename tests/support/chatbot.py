"""The chatbot of examples/chatbot: its files, small networks and rows for its tests.

Legend: V words of the vocabulary.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from support.example_modules import EXAMPLES, example_modules

FOLDER = EXAMPLES / "chatbot"

with example_modules(FOLDER) as example:
    vocabulary, data, model = example.vocabulary, example.data, example.model

BASE = len(vocabulary.BASE)  # pieces that every vocabulary has


def seq2seq(size: int = 8, units: int = 8, seed: int = 0, **options: Any) -> Any:
    """A network of large random weights, whose answers differ."""
    torch.manual_seed(seed)
    made = model.Seq2Seq(size, units=units, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.6)
    return made.eval()


def random_rows(count: int, size: int, seed: int = 0, first: int = 3) -> list[Any]:
    draw = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return draw.choices(range(first, size), k=draw.randint(least, most))

    return [
        data.Row(*map(torch.tensor, (some(1, 9), some(2, 20), [1, *some(3, 12), 2])))
        for _ in range(count)
    ]


def known(count: int) -> Any:
    """A vocabulary that has so many words."""
    return vocabulary.Vocabulary([*vocabulary.BASE, *(f"w{n}" for n in range(count))])
