"""Kill processes of Ray under runs, one after the other, and print what became of each run.

    python tests/scripts/ray_ends.py 10 raylet gcs "dashboard agent" "runtime agent" server
    python tests/scripts/ray_ends.py 10 --own-node raylet "dashboard agent"
    python tests/scripts/ray_ends.py 10 node

Arguments: kills of each kind, then the kinds, see ``PROCESSES`` in ``support/ray_ends.py``. A run
is on a local cluster of its own; with --own-node on a node of a cluster of two that was there. All
nodes, each with a worker, are killed under one run.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.ray_ends import nodes_of_one_run, on_a_local_cluster, on_own_node

if __name__ == "__main__":
    count, kinds = int(sys.argv[1]), sys.argv[2:]
    run = on_a_local_cluster
    if "--own-node" in kinds:
        kinds.remove("--own-node")
        run = on_own_node
    chance = random.Random(17)
    print("kind              code  seconds  saved  left  last line")
    for kind in kinds:
        for _ in range(1 if kind == "node" else count):
            with tempfile.TemporaryDirectory(prefix="ends-") as folder:
                if kind == "node":
                    end = nodes_of_one_run(Path(folder), count, chance)
                else:
                    end = run(Path(folder), kind, chance)
            fields = f"{end.code:4}  {end.seconds:7.1f}  {end.is_saved!s:5}  {len(end.left):4}"
            print(f"{kind:16}  {fields}  {end.last}", flush=True)
            if end.left:
                print(*(f"  left: {line[:200]}" for line in end.left), sep="\n", flush=True)
            if not end.last.startswith("quorate: "):
                print(end.said[-3000:], flush=True)
