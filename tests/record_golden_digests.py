"""Record the golden digests of this kind of processor, with the code of the base commit.

    python tests/record_golden_digests.py

Builds commit 1ed5e4f as a git worktree in a temporary folder, computes all runs of
``tests/golden/configurations.txt``, two at a time, and writes ``tests/golden/<kind>.json``. Run it
where the tests compare live, which takes twice as long, and after a line was added to the list.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from support.trainings import golden
from support.trainings.trees import BASE, CURRENT, NoBaseError, Tree, worktree

AT_A_TIME = 2


def main() -> int:
    """Record all runs."""
    runs, kind = golden.configurations(), golden.processor()
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
    failed = [run for run, result in results.items() if result["codes"][-1] != 0]
    for run in failed:
        print(f"record_golden_digests: {run}: {results[run]['codes']}", file=sys.stderr)
    if failed:
        return 1
    content = {"base": BASE, "processor": kind, "results": {str(r): results[str(r)] for r in runs}}
    file = golden.file_of(kind)
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(runs)} runs: {file.relative_to(CURRENT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
