"""Snippets of the documents: the search for snippets, and the environment of Python snippets.

The ``python`` fences of a page run in their order, in a single namespace, in an empty folder.
The namespace begins with names used by the pages without an explanation: ``names`` below. Further
needs of a fence stand in a comment right above the fence, invisible to readers::

    <!-- before:
    labels = torch.zeros(512)
    -->

A snippet that cannot run gives the reason instead: ``<!-- not run: TensorFlow 1 -->``. Packages
that may be missing: ``<!-- needs: sklearn -->``; both may stand above a fence.
"""

import gzip
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

_FENCE = re.compile(
    r"(?P<comments>(?:<!--(?:(?!-->).)*-->\n+)*)```(?P<language>\w*|\{[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!-- ?(not run|before|needs):\s*(.*?)\s*-->", re.DOTALL)


class Snippet(NamedTuple):
    """A fence of a page."""

    language: str
    text: str
    line: int  # of the page, right above the text
    not_run: str  # the reason; empty: the snippet is run
    before: str  # code
    needs: list[str]  # modules


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield all fences of a page, in their order."""
    text = page.read_text()
    for match in _FENCE.finditer(text):
        told = dict(_COMMENT.findall(match["comments"]))
        line = text[: match.start("text")].count("\n")
        needs = told.get("needs", "").split()
        about = told.get("not run", ""), told.get("before", ""), needs
        yield Snippet(match["language"], match["text"], line, *about)


class Net(nn.Module):
    """A network for small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.last = nn.Linear(144, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv1(images).relu().flatten(1))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the cross-entropy, and the accuracy."""
    images, labels = batch
    logits = model(images)
    right = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": right}


adam = partial(torch.optim.Adam, lr=1e-3)


def names() -> dict[str, Any]:
    """Return the initial namespace for the snippets of a page."""
    generator = torch.Generator().manual_seed(0)
    rows = 512
    images = torch.rand(rows, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (rows,), generator=generator)
    train_set, test_set = TensorDataset(images, labels), TensorDataset(images[:64], labels[:64])
    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "F": F,
        "json": json,
        "gzip": gzip,
        "Path": Path,
        "quorate": quorate,
        "Net": Net,
        "loss": loss,
        "adam": adam,
        "train_set": train_set,
        "test_set": test_set,
        "valid_set": test_set,
        "labels": labels,
        "trainer": quorate.Trainer(Net, loss, optimizer=adam, batch_size=256, shards=4),
    }
