"""Source trees: the current tree, and a base commit in a worktree of git's."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from support.runs import LIMIT_S, Ended

DRIVER = Path(__file__).with_name("tree_driver.py")
CURRENT = Path(__file__).parents[3]
BASE = "1ed5e4f027cb2276510c2f14a13982fd36444cdb"  # the commit of the golden digests


class NoBaseError(Exception):
    """The tree of a base commit cannot be built."""


class Runs(Protocol):
    """A runner of the command ``quorate``: ``Tree``, or ``support/scenarios.py`` for this tree."""

    def run(self, arguments: Sequence[str]) -> Ended:
        """Run the command to the end. Blocks."""


class Tree:
    """A source tree with runs of the command ``quorate``, in forks of a warm process.

    Args:
        folder: with ``src`` and ``tests``.
    """

    def __init__(self, folder: Path) -> None:
        self._env = {**os.environ, "PYTHONPATH": str(folder / "src")}
        self._driver = subprocess.Popen(
            [sys.executable, str(DRIVER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._env,
        )

    def run(self, arguments: Sequence[str]) -> Ended:
        """Run the command ``quorate`` to its end. Blocks; not for several threads at once."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        asked = {"arguments": [*arguments], "env": self._env, "limit_s": LIMIT_S}
        print(json.dumps(asked), file=self._driver.stdin, flush=True)
        answer = self._driver.stdout.readline()
        if not answer:
            raise RuntimeError(f"the driver of a tree ended with {self._driver.wait()}")
        return Ended(**json.loads(answer))

    def __enter__(self) -> "Tree":
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.communicate()  # the driver ends with its input


@contextmanager
def base_tree(commit: str = BASE) -> Iterator[Tree]:
    """Yield the tree of a commit, in a temporary folder.

    Raises:
        NoBaseError: the history here lacks the commit, or there is no history.
    """
    found = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if found.returncode != 0:
        raise NoBaseError(
            f"commit {commit[:7]} is not in the history of {CURRENT}; fetch it with "
            f"git fetch --unshallow, or git fetch origin {commit}"
        )
    with tempfile.TemporaryDirectory(prefix="quorate-base-") as folder:
        place = Path(folder) / "tree"
        made = _git("worktree", "add", "--detach", str(place), found.stdout.strip())
        if made.returncode != 0:
            raise NoBaseError(f"git worktree add: {made.stderr.strip()}")
        try:
            with Tree(place) as tree:
                yield tree
        finally:
            _git("worktree", "remove", "--force", str(place))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", str(CURRENT), *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise NoBaseError("git is not installed: a base commit cannot be built") from None
