"""The tests of each line, and the time of each test: recorded once for a source tree.

A recording is a folder with ``tests.json`` and the data of coverage.py.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from coverage import CoverageData
from support.mutants.trees import environment

CONFIGURATION = """
[run]
branch = true
parallel = true
source = {tree}/src/quorate
concurrency = thread
patch = subprocess, fork, _exit
plugins = contexts
data_file = {folder}/data
"""


class Executed(NamedTuple):
    """Tests by line, and times by test."""

    tests: dict[str, dict[int, list[str]]]  # by file under src/quorate and line: ids of tests
    times_s: dict[str, float]  # by id of a test

    def by(self, file: str, line: int) -> list[str]:
        """Return the tests that execute a line, the fastest first.

        For a line executed by an import alone: the tests of any line of the file.
        """
        lines = self.tests.get(file, {})
        found = lines.get(line, [])
        if not found and line in lines:
            found = [*{test: None for tests in lines.values() for test in tests}]
        return sorted(found, key=lambda test: (self.times_s.get(test, 60.0), test))


def record(tree: Path, folder: Path, selection: Sequence[str]) -> None:
    """Run the tests of a tree with coverage, and write the tests of each line.

    Args:
        tree: a folder with ``src`` and ``tests``.
        folder: where to write; coverage.py's own data stays there too.
        selection: arguments of pytest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    configuration, times = folder / "coverage.ini", folder / "times.xml"
    configuration.write_text(CONFIGURATION.format(tree=tree, folder=folder))
    coverage = [sys.executable, "-m", "coverage"]
    rc = f"--rcfile={configuration}"
    env = environment(tree, Path(__file__).parent)
    junit = f"--junit-xml={times}"
    # The exit code says whether tests failed; lines of failed tests count nevertheless.
    subprocess.run(
        [*coverage, "run", rc, "-m", "pytest", "-p", "contexts", junit, *selection],
        cwd=tree,
        env=env,
    )
    subprocess.run([*coverage, "combine", rc, "--quiet"], cwd=tree, env=env, check=True)
    data = CoverageData(str(folder / "data"))
    data.read()
    tests: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        contexts = data.contexts_by_lineno(file)
        name = str(Path(file).relative_to(tree / "src" / "quorate"))
        tests[name] = {line: sorted(filter(None, of)) for line, of in sorted(contexts.items())}
    recorded = {"tests": tests, "times_s": _times_s(times)}
    (folder / "tests.json").write_text(json.dumps(recorded))


def _times_s(junit: Path) -> dict[str, float]:
    """Return the time of each test by the test's id; tests are functions of modules here."""
    cases = ElementTree.parse(junit).iter("testcase")
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
            case.attrib["time"]
        )
        for case in cases
    }


def load(folders: Sequence[Path]) -> Executed:
    """Return the union of recordings, of a single tree in several selections."""
    tests: dict[str, dict[int, list[str]]] = {}
    times_s: dict[str, float] = {}
    for folder in folders:
        recorded = json.loads((folder / "tests.json").read_text())
        times_s |= recorded["times_s"]
        for file, lines in recorded["tests"].items():
            of_file = tests.setdefault(file, {})
            for line, ids in lines.items():
                of_file[int(line)] = sorted({*of_file.get(int(line), []), *ids})
    return Executed(tests, times_s)
