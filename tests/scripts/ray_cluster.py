"""A Ray cluster whose nodes are all on this machine. It is over when its standard input is.

    python tests/scripts/ray_cluster.py 2 1

Arguments: the CPUs of each node; the first one is the head. Prints the address, then carries out
what it reads, a line each, and prints "done": "kill N" kills node N, "add CPUS" adds one, and
"drain N" has Ray drain node N, as before a preemption.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

STORE_BYTES = 100 << 20

cluster = Cluster()
try:
    nodes = [
        cluster.add_node(num_cpus=int(cpus), object_store_memory=STORE_BYTES)
        for cpus in sys.argv[1:]
    ]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, number = line.split()
        if word == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
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
        print("done", flush=True)
finally:
    cluster.shutdown()
