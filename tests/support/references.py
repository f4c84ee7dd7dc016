"""References: the values to compare runs with, each computed once per test run.

A reference is a script of ``tests/scripts`` on a single tower, or the result of a function. The
reference is kept in a file of the test run's temporary folder, shared by the processes of
pytest-xdist, by its inputs. The first caller computes; callers meanwhile wait.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.runs import TOWER, command, inspected, last_json, run


class Reference(NamedTuple):
    """The results of a script on a single tower."""

    out: str  # the output
    facts: dict[str, Any]  # the facts of `quorate inspect` on the run directory, if saved

    @property
    def digests(self) -> tuple[str, str | None]:
        """The digests of the weights and of the averaged weights, as ``runs.digests``."""
        return self.facts["digest"], self.facts.get("averaged_digest")

    @property
    def json(self) -> Any:
        """The last line of JSON in the script's output."""
        return last_json(self.out)


class References:
    """All references of a test run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    @classmethod
    def of_this_test_run(cls, request: pytest.FixtureRequest) -> "References":
        """Return the references shared by all processes of this test run."""
        factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
        base = factory.getbasetemp()
        # A process of xdist has a separate folder inside the test run's. Without xdist the folder
        # above belongs to all test runs of this user, perhaps with another source. The environment
        # does not tell: a test may start a test run of its own.
        return cls((base.parent if hasattr(request.config, "workerinput") else base) / "references")

    def once(self, compute: Callable[[], Any], *key: Any) -> Any:
        """Return the result of a function at the first request for the key by any process.

        Args:
            compute: returns a value that JSON can hold.
            key: all inputs of the function, as JSON.
        """
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        with open(self._folder / f"{name}.json", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or this process has ended
            file.seek(0)
            if not (text := file.read()):
                text = json.dumps(compute())
                file.write(text)
        return json.loads(text)

    def on_a_tower(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> Reference:
        """Return the results of a script on a single tower, with a separate run directory.

        Args:
            script: its name in ``tests/scripts``.
            arguments: the script's own.
            options: of ``quorate run`` beside engine, workers and run directory.
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
