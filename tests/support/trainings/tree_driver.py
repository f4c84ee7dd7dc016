"""A process that runs the command ``quorate`` of a source tree, run by run.

    PYTHONPATH=TREE/src python tree_driver.py TREE

Reads a line of JSON for each run and answers with a line of JSON: see ``trees``. Runs are forks of
the tree's own warm process (``tests/support/warm.py``), because that file knows the imports of the
tree. The driver uses no name of the tree but ``WARM``, so any commit with that name can be a base.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[1], "tests")))

from support.warm import WARM

import quorate


def main() -> None:
    """Serve until the input ends."""
    assert Path(quorate.__file__).is_relative_to(sys.argv[1]), quorate.__file__
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            code, out, err = WARM.run(asked["arguments"], asked["env"], asked["limit_s"])
        except subprocess.TimeoutExpired as late:
            code, out, err = None, "", "\n".join(late.__notes__)
        print(json.dumps({"code": code, "out": out, "err": err}), flush=True)


if __name__ == "__main__":
    main()
