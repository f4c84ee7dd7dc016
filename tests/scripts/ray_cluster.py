"""A Ray cluster with all nodes on this machine. The cluster ends with its standard input.

    python tests/scripts/ray_cluster.py 2 1

Arguments: the CPUs of each node; the first node is the head. Prints the address, then carries out
commands, a line each, and prints "done": "kill N" kills node N, "add CPUS" adds a node, and
"drain N" has Ray drain node N, as before a preemption. "left X" prints, in place of "done", the
remains of programs there: actors that are not dead, placement groups, and a line about objects.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import ray
from ray._private.internal_api import memory_summary
from ray._private.state import actors
from ray.cluster_utils import Cluster

STORE_BYTES = 100 << 20
ANSWERS = os.fdopen(os.dup(1), "w")  # standard output has Ray's words on dying nodes, too
os.dup2(2, 1)


def left() -> dict[str, object]:
    """Return the remains of other programs. The state in ``ray list`` needs a dashboard."""
    if not ray.is_initialized():
        ray.init(cluster.address, log_to_driver=False)
    alive = {name: actor["State"] for name, actor in actors().items() if actor["State"] != "DEAD"}
    groups = ray.util.placement_group_table()
    kept = [group for group in groups.values() if group["state"] != "REMOVED"]
    summary = memory_summary(cluster.address, stats_only=True)
    (objects,) = (line for line in summary.splitlines() if line.startswith("Plasma memory usage"))
    return {"actors": alive, "groups": kept, "objects": objects}


cluster = Cluster()
try:
    nodes = [
        cluster.add_node(num_cpus=int(cpus), object_store_memory=STORE_BYTES)
        for cpus in sys.argv[1:]
    ]
    print(cluster.address, flush=True, file=ANSWERS)
    for line in sys.stdin:
        word, number = line.split()
        if word == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        elif word == "left":
            print(json.dumps(left()), flush=True, file=ANSWERS)
            continue
        elif word == "drain":
            subprocess.run(
                [
                    *(str(Path(sys.executable).with_name("ray")), "drain-node"),
                    *("--address", cluster.address, "--node-id", nodes[int(number)].node_id),
                    *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"),
                    *("--deadline-remaining-seconds", "60"),
                ],
                check=True,
                stdout=sys.stderr,
            )
        else:
            nodes.append(cluster.add_node(num_cpus=int(number), object_store_memory=STORE_BYTES))
        print("done", flush=True, file=ANSWERS)
finally:
    cluster.shutdown()
