"""Tensors in messages: what a shard represents, and gradients, over a real wire."""

from __future__ import annotations

import threading

import pytest
import torch

from quorate.replica.shard_sum import ShardSum
from quorate.replica.whole_batch.represented import Represented
from quorate.transports.processes.records import packed, unpacked
from quorate.transports.processes.tensors import by_row, deal_out
from quorate.transports.processes.tensors import packed as packed_tensors
from quorate.transports.processes.tensors import unpacked as unpacked_tensors
from quorate.transports.processes.wire import Message, Wire

SHARDS = [
    {
        "z": torch.randn(rows, 3, dtype=dtype).T,  # not contiguous
        "label": torch.arange(rows),
        "none": torch.empty(rows, 0),
        "is": torch.ones(rows, dtype=torch.bool),
    }
    for rows, dtype in ((3, torch.float64), (4, torch.float16), (0, torch.bfloat16))
]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in one.items()
    )


def test_they_come_over_a_wire_as_they_were() -> None:
    ours, theirs = Wire.pair()
    message: Message = {"kind": "compute", "job": 1, **packed_tensors(SHARDS)}
    try:
        ours.post(message)
        received = theirs.receive()
    finally:
        ours.close()
        theirs.close()
    assert received == message
    found = unpacked_tensors(received)
    assert all(same(*pair) for pair in zip(found, SHARDS, strict=True))
    for shard in found:
        for tensor in shard.values():
            assert tensor.data_ptr() % 64 == 0  # as torch allocates: bits may depend on it


def test_megabytes_come_in_parts() -> None:
    """More than a pair of sockets holds: a worker's end waits, the coordinator's does not."""
    large = [{"": torch.randn(1000, 1000)}]
    ours, theirs = Wire.pair()
    message: Message = {"kind": "done", **packed_tensors(large)}
    sending = threading.Thread(target=theirs.send, args=(message,))
    try:
        sending.start()
        received = ours.receive()
        sending.join()
        ours.post(message)
        assert ours.has_unsent
        reading = threading.Thread(target=lambda: echoed.append(theirs.receive()))
        echoed: list[Message | None] = []
        reading.start()
        while ours.has_unsent:
            ours.flush()
        reading.join()
    finally:
        ours.close()
        theirs.close()
    for each in (received, *echoed):
        assert each is not None
        assert same(unpacked_tensors(each)[0], large[0])


def test_what_a_run_of_shards_represents_is_dealt_out() -> None:
    results = [
        ShardSum(2.0, {"loss": 0.0}, represented=[Represented("dict", shard)]) for shard in SHARDS
    ]
    parts = [{"weight": 2.0}, {"weight": 2.0}]
    message = unpacked(packed({"kind": "done", "more": parts, **by_row(results)[0]}) or b"")
    assert message is not None
    deal_out(message)
    for part, shard in zip((message, *message["more"]), SHARDS, strict=True):
        ((kind, tensors),) = part["represented"]
        assert kind == "dict"
        assert same(tensors, shard)


@pytest.mark.parametrize("results", [[], [ShardSum(1.0, {"loss": 0.0})]])
def test_other_shards_say_nothing_of_rows(results: list[ShardSum]) -> None:
    assert by_row(results) == ({}, None)
