"""Serving: parameters and gradients on their way between workers and servers, host by host.

Servers have a slice each, on hosts of workers, the coordinator's last. Ray brings a host the slices
of others once per update, and each shard's gradient goes out in slices. A worker beside the only
server waits for neither: under ``sync`` it takes over shards of those that do. All hosts are taken
to send at once, so a link that is short is shared by all who use it.

Legend: H hosts, P workers of a host, N workers, S servers, G bytes of a gradient and of the
parameters, h host, w worker, t step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from quorate.simulation.inputs import Network
from quorate.simulation.virtual_run import Work


class Serving:
    """What links add to shards where there are servers; nothing where there are none.

    Args:
        network: what is sent, and how fast.
        hosts: of each worker, from 0, the coordinator's.
    """

    def __init__(self, network: Network, hosts: Sequence[int]) -> None:
        self._hosts, self._servers = hosts, network.servers
        count = max(hosts) + 1
        self.pulls_s = [0.0] * count  # by host: of an update
        self.pushes_s = [0.0] * count  # of a shard
        if not self._servers:
            return
        owns = Counter((1 + number) % count for number in range(self._servers))
        own = [owns[host] / self._servers for host in range(count)]  # part of all
        workers = Counter(hosts)
        link_s, ray_s = network.link_s, network.ray_s  # Ray's is the same within a host
        middle_s = network.gradient_bytes / network.bisection_bytes_per_s * (count > 1)
        for host in range(count):
            self.pulls_s[host] = self.pushes_s[host] = ray_s
            if own[host] == 1.0:  # all that its workers need is there
                continue
            # In over its own link; out of each other that has a slice, to all hosts but that.
            others = [other for other in range(count) if other != host and own[other]]
            sent = max((count - 1) * own[other] for other in others)
            in_s = max(1.0 - own[host], sent) * link_s
            self.pulls_s[host] += max(in_s, count / 2 * middle_s)
            # Out of its own link; into each other that has one, from all workers elsewhere.
            taken = max((len(hosts) - workers[other]) * own[other] for other in others)
            out_s = max(workers[host] * (1.0 - own[host]), taken) * link_s
            self.pushes_s[host] += max(out_s, len(hosts) / 2 * middle_s)

    @property
    def median_s(self) -> float:
        """What a shard of its own takes the worker of a host in links, seconds."""
        return median(pull + push for pull, push in zip(self.pulls_s, self.pushes_s, strict=True))

    def around(self, shard_s: Callable[[int, int, int], Work]) -> Callable[[int, int, int], Work]:
        """Return what shards take with links, for one run, from what they take without.

        The first shard of a step waits for parameters. The next ones of a worker are begun while
        the gradient of the one before is on its way.
        """
        if not self._servers:
            return shard_s
        steps: dict[int, int] = {}  # by worker: of its newest shard

        def linked(worker: int, step: int, shard: int) -> Work:
            work, host = shard_s(worker, step, shard), self._hosts[worker]
            push_s = self.pushes_s[host]
            if steps.get(worker) == step:
                computing_s = max(0.0, work.computing_s - push_s)
                return work._replace(computing_s=computing_s, pushing_s=push_s)
            steps[worker] = step
            return work._replace(pulling_s=self.pulls_s[host], pushing_s=push_s)

        return linked
