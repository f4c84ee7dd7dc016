"""Mistakes in scripts: each on the page messages.md is made, and has its line there.

    python docs/mistakes.py            # writes the lines
    python docs/mistakes.py --check    # says which are not what a run says

An entry of the page is a title, the code that is wrong, and the line. A comment behind the title
has options of the run; with ``--engine processes`` it runs as a program, which workers need.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from quorate.commands.main import main

PAGE = Path(__file__).parent / "messages.md"
ENTRY = re.compile(
    r"^\*\*(?P<what>.+?)\*\*(?: <!-- (?P<options>.*?) -->)?\n\n"
    r"```python\n(?P<code>.*?)```\n\n```text\n(?P<line>.*?)\n?```$",
    re.MULTILINE | re.DOTALL,
)
# What all have in common, and the page says of it; what is wrong comes behind it.
BEGIN = """\
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import quorate

torch.manual_seed(0)
rows = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))


def net():
    return torch.nn.Linear(4, 1)


def loss(model, batch):
    inputs, wanted = batch
    return (model(inputs) - wanted).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


"""
TRAINER = "trainer = quorate.Trainer(net, loss, optimizer=sgd, batch_size=8)\n"
FIT = "trainer.fit(rows)\n"


class Mistake(NamedTuple):
    """An entry of the page."""

    what: str
    options: tuple[str, ...]  # of the run
    code: str
    line: str

    @property
    def script(self) -> str:
        """The whole program: what the entry does not say is as it ought to be."""
        trainer = "" if "Trainer(" in self.code else TRAINER
        fit = "" if re.search(r"^trainer\.fit\(|^    trainer\.fit\(", self.code, re.M) else FIT
        return f"{BEGIN}{self.code}{trainer}{fit}"

    def made(self) -> tuple[str, int]:
        """Make it; return the last line of standard error, without folders, and the exit code.

        Raises:
            AssertionError: there is a traceback.
        """
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            Path("train.py").write_text(self.script, encoding="utf-8")
            run = _as_a_program if "processes" in self.options else _here
            errors, code = run(["run", *self.options, "train.py"])
        assert "Traceback" not in errors, f"{self.what}: {errors}"
        lines = errors.strip().splitlines()
        return lines[-1].replace(f"{folder}/", "") if lines else "", code


def mistakes() -> list[Mistake]:
    """Return all entries of the page."""
    found = ENTRY.finditer(PAGE.read_text(encoding="utf-8"))
    return [_read(match) for match in found]


def _read(match: re.Match[str]) -> Mistake:
    options = match["options"] or "--devices cpu --workers 1"
    return Mistake(match["what"], tuple(options.split()), match["code"], match["line"])


def _here(words: list[str]) -> tuple[str, int]:
    """Run the command in this process: what it says, and its exit code."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = main(words)
    return errors.getvalue(), code


def _as_a_program(words: list[str]) -> tuple[str, int]:
    """Run the command in a process of its own, which has an input."""
    line = [sys.executable, "-m", "quorate", *words]
    ended = subprocess.run(line, input="a name\n", capture_output=True, text=True, timeout=300)
    return ended.stderr, ended.returncode


def _with_line(match: re.Match[str]) -> str:
    begin, end = match.start("line") - match.start(), match.end("line") - match.start()
    line, _ = _read(match).made()
    return f"{match[0][:begin]}{line}{match[0][end:]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        wrong = [mistake.what for mistake in mistakes() if mistake.made()[0] != mistake.line]
        sys.exit(f"python docs/mistakes.py mends: {', '.join(wrong)}" if wrong else 0)
    PAGE.write_text(ENTRY.sub(_with_line, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
