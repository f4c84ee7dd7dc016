"""Mistakes at the command, as typed, each with the resulting line.

The mistakes stand in `docs/messages.md`, and nowhere else: the test runs each in a folder with the
files of ``make``, and compares the line.
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "messages.md"
SCRIPT = """\
import torch

import quorate

trainer = quorate.Trainer(
    torch.nn.Linear(3, 1),
    lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=8,
)
trainer.fit(torch.utils.data.TensorDataset(torch.ones(16, 3)))
"""


def make(folder: Path) -> None:
    """Make the objects of the mistakes: a script, a package, an empty run directory, a text."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "notes.txt").write_text("n")
    sys.modules.pop("pkg", None)  # of another test, in another folder
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    (folder / "runs" / "a").mkdir(parents=True)


def _mistakes() -> dict[str, list[tuple[str, str]]]:
    at_the_command = PAGE.read_text().partition("<!-- mistakes: ")[2]
    at_the_command = at_the_command.partition("<!-- end of the mistakes -->")[0]
    sections = re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)\n```$", at_the_command, re.M | re.S)
    found = {heading: re.findall(r"^\$ (.+)\n(.+)$", block, re.M) for heading, block in sections}
    typed = re.findall(r"^\$ ", at_the_command, re.M)
    assert sum(map(len, found.values())) == len(typed), "a mistake is not read"
    return found


# By a heading: the typed words, and the line.
MISTAKES = _mistakes()
