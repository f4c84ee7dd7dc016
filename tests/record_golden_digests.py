"""Record the golden digests of this kind of processor, with the code of the base commit.

    python tests/record_golden_digests.py

Builds commit 1ed5e4f as a git worktree in a temporary folder, and computes two at a time all runs
of ``tests/golden/configurations.txt``, and runs that go on from the checkpoints of
``tests/fixtures/checkpoints-1ed5e4f``. Writes ``tests/golden/<kind>.json`` and ``digests`` beside
the checkpoints. Run it where the tests compare live, which takes twice as long, and after a line
was added to the list.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.trainings import checkpoints, golden
from support.trainings.checkpoints import CHECKPOINTS, resume
from support.trainings.trees import BASE, CURRENT, NoBaseError, Tree, worktree

AT_A_TIME = 2


def write(file: Path, results: Mapping[str, Any]) -> None:
    """Write the results of this kind of processor."""
    content = {"base": BASE, "processor": golden.processor(), "results": results}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(results)} runs: {file.relative_to(CURRENT)}")


def main() -> int:
    """Record all runs."""
    runs = golden.configurations()
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(worktree(BASE))
        except NoBaseError as error:
            print(f"record_golden_digests: {error}", file=sys.stderr)
            return 2
        trees = [stack.enter_context(Tree(folder)) for _ in range(AT_A_TIME)]
        shares = [runs[number::AT_A_TIME] for number in range(AT_A_TIME)]
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            parts = pool.map(golden.results, trees, shares)
            results = {run: result for part in parts for run, result in part.items()}
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quorate-")))
        resumed = {name: resume(trees[0], name, place / name).facts for name in CHECKPOINTS}
    failed = [run for run, result in results.items() if result["codes"][-1] != 0]
    for run in failed:
        print(f"record_golden_digests: {run}: {results[run]['codes']}", file=sys.stderr)
    if failed:
        return 1
    write(golden.file_of(golden.processor()), {str(run): results[str(run)] for run in runs})
    write(checkpoints.digests_file(), resumed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
