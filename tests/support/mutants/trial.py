"""Trials of mutants: the tests of a changed line run until the first failure."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support.mutants.executed import Executed
from support.mutants.kinds import Mutation
from support.mutants.trees import environment

TESTS_S = 25.0  # recorded time of the chosen tests, with coverage
MOST_TESTS = 40


class Mutant(NamedTuple):
    """A mutation in a file under src/quorate."""

    file: str
    mutation: Mutation

    @property
    def room(self) -> str:
        """The folder of the file, or ``.`` for files without a folder."""
        return self.file.partition("/")[0] if "/" in self.file else "."

    def __str__(self) -> str:
        return f"{self.file}:{self.mutation.line} {self.mutation.kind}"


class Verdict(NamedTuple):
    """The tests' verdict on a mutant."""

    outcome: str  # killed, hung, survived, or unexecuted: no test executes the line
    by: str = ""  # the failed test
    tests: int = 0  # the number of chosen tests


def choose(executed: Executed, mutant: Mutant) -> list[str]:
    """Return the tests to run: the fastest tests of the line, within ``TESTS_S``."""
    chosen: list[str] = []
    total_s = 0.0
    for test in executed.by(mutant.file, mutant.mutation.line)[:MOST_TESTS]:
        total_s += executed.times_s.get(test, TESTS_S)
        if chosen and total_s > TESTS_S:
            break
        chosen.append(test)
    return chosen


@dataclass
class Trials:
    """Tries mutants in a single copy of a tree, in sequence."""

    tree: Path  # the copy; mutants are written into its source and taken back
    executed: Executed  # the tests of each line
    fails: dict[str, bool]  # whether a test fails without a mutant too; shared with other trials
    limit_s: float  # of the tests of a mutant

    def run(self, mutant: Mutant) -> Verdict:
        """Return the verdict on a mutant."""
        tests = choose(self.executed, mutant)
        if not tests:
            return Verdict("unexecuted")
        path = self.tree / "src" / "quorate" / mutant.file
        text = path.read_text()
        while tests:
            path.write_text(mutant.mutation.apply(text))
            try:
                failed = self._first_failure(tests)
            finally:
                path.write_text(text)
            if failed is None:
                return Verdict("survived", tests=len(tests))
            if failed == "":
                return Verdict("hung", tests=len(tests))
            if not self._fails_anyway(failed):
                return Verdict("killed", failed, len(tests))
            tests = [test for test in tests if test != failed]
        return Verdict("unexecuted")

    def _fails_anyway(self, test: str) -> bool:
        if test not in self.fails:
            self.fails[test] = self._first_failure([test]) is not None
        return self.fails[test]

    def _first_failure(self, tests: list[str]) -> str | None:
        """Return the first failed test; "" if tests take too long, ``None`` without failures."""
        options = ["-x", "-q", "--no-header", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.tree,
            env=environment(self.tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return ""
        if process.returncode == 0:
            return None
        for line in out.splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split(" ", 1)[1].split(" - ")[0].strip()
        return tests[0]  # the tests could not even be collected, or the process died
