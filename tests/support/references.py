"""References: what runs are compared with, each computed once per test run.

A reference is a script of ``tests/scripts`` on one tower, or a value that a function returns. It is
kept in a file of the test run's temporary folder, which the processes of pytest-xdist share, by
what it depends on. Who asks first computes it; who asks meanwhile waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.runs import TOWER, command, inspected, last_json, run


class Reference(NamedTuple):
    """What a script did on one tower."""

    out: str  # what it printed
    facts: dict[str, Any]  # what `quorate inspect` says of its run directory, if it saved anything

    @property
    def digests(self) -> tuple[str, str | None]:
        """The digests of the weights and of the averaged weights, as ``runs.digests``."""
        return self.facts["digest"], self.facts.get("averaged_digest")

    @property
    def json(self) -> Any:
        """The last line of JSON that the script printed."""
        return last_json(self.out)


class References:
    """All references of a test run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    @classmethod
    def of_this_test_run(cls, factory: pytest.TempPathFactory) -> References:
        """Return the references that all processes of this test run share."""
        base = factory.getbasetemp()
        # A process of xdist has a folder of its own in that of the test run. Without xdist the
        # folder above is that of all test runs of this user, whose source may have been another.
        return cls((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references")

    def once(self, compute: Callable[[], Any], *key: Any) -> Any:
        """Return what a function returned when the first of all processes asked for the key.

        Args:
            compute: returns something that JSON can hold.
            key: all that it depends on, as JSON.
        """
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        with open(self._folder / f"{name}.json", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or this process has ended
            file.seek(0)
            if not (text := file.read()):
                text = json.dumps(compute())
                file.write(text)
        return json.loads(text)

    def on_a_tower(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> Reference:
        """Return what a script does on one tower, with a run directory of its own.

        Args:
            script: its name in ``tests/scripts``.
            arguments: the script's own.
            options: those of ``quorate run`` beside engine, workers and run directory.
        """
        key = (script, arguments, options)

        def compute() -> tuple[str, dict[str, Any]]:
            name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
            run_dir = self._folder / f"run-{name}"
            words = (*TOWER, *options, "--run-dir", str(run_dir))
            ended = run(command(script, *arguments, options=words))
            assert ended.code == 0, ended.said
            has_saved = (run_dir / "checkpoints").is_dir()
            return ended.out, inspected(run_dir) if has_saved else {}

        return Reference(*self.once(compute, *key))
