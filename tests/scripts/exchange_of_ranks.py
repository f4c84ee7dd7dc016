"""One rank of an exchange: vectors that follow from the rank, and their sum along the tree.

    python tests/scripts/exchange_of_ranks.py RANK HOSTS V SHARED BUCKET_BYTES FOLDER

HOSTS: the host of each rank, "aab" say. SHARED: "shared", "one" where ranks of a host have the
parameters once, "sent", or "native".
"""

from __future__ import annotations

import sys

import torch

from quorate.coordination.ownership import leaves
from quorate.coordination.tree import tree_sum
from quorate.machine import this_host
from quorate.replica.digest import digest
from quorate.replica.flat import Flat, Layout
from quorate.transports.collective.exchange import Exchange
from quorate.transports.collective.native import NativeExchange
from quorate.transports.collective.place import Place
from quorate.transports.collective.ranks import Ranks

rank, hosts, shards, shared, bucket_bytes, folder = sys.argv[1:]
RANK, V = int(rank), int(shards)
SIZES = {"small": 70_000, "large": 400_000, "odd": 77}

torch.set_num_threads(1)
this_host.mark = lambda: hosts[RANK]  # several hosts in one


def gradient(shard: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + shard)
    found = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    return {**found, "wide": torch.randn(90_000, generator=generator).double()}


def filled(layout: Layout, shard: int, step: int) -> Flat:
    flat = layout.new(torch.device("cpu"))
    flat.fill(gradient(shard, step))
    return flat


layout = Layout(gradient(0, 0).items())
parameters = layout.shared() if shared in ("shared", "one") else layout.new(torch.device("cpu"))
ranks = Ranks(Place(RANK, len(hosts), 0, f"file://{folder}/meet"), torch.device("cpu"), 60.0)
kind = NativeExchange if shared == "native" else Exchange
exchange = kind(ranks, layout, int(bucket_bytes))
own_vectors = [vector.data_ptr() for vector in parameters.vectors]
exchange.open(parameters, by_owners=shared == "one")
assert [vector.data_ptr() for vector in parameters.vectors] == own_vectors
node = exchange.dealt(V)[RANK]
for step in range(3):
    if node is not None:
        exchange.outbox.clear()
        mine = [((0, s), filled(layout, s, step)) for s in leaves(node, V)]
        own = tree_sum(mine, V, Flat.add_, present=len(mine))
        exchange.outbox.fill(own.views)
    total = exchange.sum(V)
    exchange.slices.put(total, parameters)
    ranks.gather(b"")  # as at the end of a step
    exchange.spread(parameters)
    whole = layout.new(torch.device("cpu"))  # what is no parameter goes another way
    exchange.slices.put(total, whole)
    exchange.spread(whole)
    expected = tree_sum([((0, s), filled(layout, s, step)) for s in range(V)], V, Flat.add_)
    for got in (parameters, whole):
        if kind is Exchange:
            assert digest(got.views.items()) == digest(expected.views.items()), step
        for name, view in expected.views.items():
            assert torch.allclose(got.views[name], view, atol=1e-4), name
    assert len(total.vectors[0]) <= 1.4 * len(parameters.vectors[0]) / len(hosts) + 65536
print("shares", exchange._near.shares)
if shared == "one":  # what the first rank of a host writes, the others of it have
    members = ranks.hosts.ranks[ranks.hosts.of[RANK]]
    ranks.gather(b"")
    if members[0] == RANK:
        parameters.views["odd"].fill_(RANK + 1)
    ranks.gather(b"")
    assert bool((parameters.views["odd"] == members[0] + 1).all())
    assert exchange.has_one_copy == (len(members) == len(hosts))
ranks.close("it is done")
