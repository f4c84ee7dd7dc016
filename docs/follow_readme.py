"""Follows README.md to the letter, in a fresh clone and a new environment, and compares.

    python docs/follow_readme.py                      # all: an environment, a training, kills
    python docs/follow_readme.py --without kill_it    # all commands without this word
    python docs/follow_readme.py --environment .venv  # the clone with packages that are there

A fence under a comment ``file: NAME`` is written to that file. Each line of one that says ``bash``
is run, and each line behind ``$ `` of one that says nothing; what is printed has to have the lines
shown below it, in their order, with others between (``...`` says so, and need not). Times and what
hangs on them may be any. Numbers with a point and digests may be another processor's: that is said,
and digests that are shown equal have to be equal. Exit code 1: a line is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"(?:<!-- file: (?P<file>\S+) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
TOKEN = re.compile(r"\b[0-9a-f]{64}\b|\d[\d,]*(?:\.\d+)?")
# Lines in which every number hangs on when something happened.
TIMED = re.compile(r"^resumed step")
# Lines on a worker: also which one, and what it was at, which stands before a semicolon.
OF_WORKER = re.compile(r"^worker \d")
TIME = re.compile(r"^( examples/s| s\b| ms\b|:\d\d|%)")  # behind a number
TOLERANCE = 0.05  # of a number with a point on another processor, absolute and relative
LIMIT_S = 3600


class Step(NamedTuple):
    """A command, and what is shown of its output; or a file."""

    command: str
    shown: list[str]
    file: str = ""


def steps(text: str) -> Iterator[Step]:
    """Yield what a page has one do, in its order."""
    for fence in FENCE.finditer(text):
        lines = fence["text"].splitlines()
        if fence["file"]:
            yield Step("", lines, fence["file"])
        elif fence["language"] == "bash":
            yield from (Step(line, []) for line in lines if line.strip())
        elif not fence["language"] and lines and lines[0].startswith("$ "):
            for part in re.split(r"^\$ ", fence["text"], flags=re.MULTILINE)[1:]:
                command, *shown = part.splitlines()
                yield Step(command, [line for line in shown if line.strip() not in ("", "...")])


class Comparison:
    """Lines that are shown, and lines that were printed, over all commands of a page."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}  # shown -> printed
        self.others = 0  # numbers and digests of another processor

    def missing(self, shown: list[str], printed: list[str]) -> str | None:
        """Return the first line that is shown and was not printed in its turn; None: all were."""
        left = iter(printed)
        for line in shown:
            if not any(self._is_like(line, each) for each in left):
                return line
        return None

    def _is_like(self, shown: str, printed: str) -> bool:
        if OF_WORKER.match(shown):
            parts = TOKEN.sub("0", shown).rstrip().split("; ")
            return all(part in TOKEN.sub("0", printed) for part in parts)
        if TOKEN.sub("0", shown).rstrip() != TOKEN.sub("0", printed).rstrip():
            return False
        others, digests = 0, {}
        for one, other in zip(TOKEN.finditer(shown), TOKEN.finditer(printed), strict=True):
            is_time = TIME.match(shown[one.end() :]) or shown[: one.start()].endswith(":")
            if TIMED.match(shown) or is_time:
                continue
            if len(one[0]) == 64:
                if {**self.digests, **digests}.setdefault(one[0], other[0]) != other[0]:
                    return False
                digests[one[0]] = other[0]
            elif one[0] != other[0] and not _is_near(one[0], other[0]):
                return False
            others += one[0] != other[0]
        self.digests |= digests
        self.others += others
        return True


def _is_near(shown: str, printed: str) -> bool:
    """Whether another processor may compute it; whole numbers are counts."""
    if "." not in shown:
        return False
    one, other = (float(number.replace(",", "")) for number in (shown, printed))
    return abs(one - other) <= TOLERANCE * max(1.0, abs(one))


def follow(page: Path, folder: Path, env: dict[str, str], without: list[str]) -> bool:
    """Do what a page says in a folder; say what came of each step, and return whether all did."""
    comparison, are_all = Comparison(), True
    for step in steps(page.read_text(encoding="utf-8")):
        if step.file:
            (folder / step.file).write_text("\n".join(step.shown) + "\n", encoding="utf-8")
            continue
        command = step.command.partition("  #")[0].strip()
        if word := next((word for word in without if word in command), None):
            print(f"left out ({word}): {command}", flush=True)
            continue
        before = comparison.others
        line = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        missing = comparison.missing(step.shown, line.stdout.splitlines())
        is_killed = "kill -9" in command  # by the command itself
        if missing is not None or (line.returncode and not is_killed):
            are_all = False
            why = f"exit code {line.returncode}" if missing is None else f"not printed: {missing}"
            print(f"DIFFERS: {command}\n  {why}\n{line.stdout}", flush=True)
            continue
        others = comparison.others - before
        note = f", {others} numbers or digests as of another processor" if others else ""
        print(f"as shown ({len(step.shown)} lines{note}): {command}", flush=True)
    return are_all


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", default="README.md", help="which page (README.md)")
    parser.add_argument("--environment", type=Path, help="one that is there; default: a new one")
    parser.add_argument("--without", action="append", default=[], metavar="WORD")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quorate-readme-", ignore_cleanup_errors=True) as name:
        clone = Path(name, "quorate")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        env = dict(os.environ)
        if asked.environment is None:
            environment = Path(name, "environment")
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
            env.pop("PYTHONPATH", None)
        else:
            environment = asked.environment.absolute()
            env["PYTHONPATH"] = str(clone / "src")
            asked.without.append("pip install")
        env["PATH"] = f"{environment / 'bin'}{os.pathsep}{env['PATH']}"
        return 0 if follow(clone / asked.page, clone, env, asked.without) else 1


if __name__ == "__main__":
    sys.exit(main())
