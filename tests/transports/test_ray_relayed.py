"""What travels between a coordinator and a node: images of an arena fit into one made there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from quorate.replica.flat import Layout
from quorate.replica.model import bind, trainable
from quorate.transports.processes.arena import Arena
from quorate.transports.processes.script import Script
from quorate.transports.ray.relayed import (
    Part,
    arena_like,
    described,
    difference,
    image_of,
    packed,
    same_everywhere,
    unpacked,
)
from quorate.transports.worker_status import Doing, Timesheet


def arena_of(model: nn.Module, *, on_snapshots: bool = True) -> Arena:
    parameters = Layout(trainable(model).items()).shared()
    bind(trainable(model), parameters)
    torch.nn.init.normal_(parameters.vectors[0])
    return Arena.create(
        model,
        parameters,
        parameters.new(),
        mutable_frozen=(),
        results=4,
        on_snapshots=on_snapshots,
        workers=3,
    )


def model() -> nn.Module:
    made = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    made[3].bias.requires_grad_(requires_grad=False)
    return made


def test_a_nodes_arena_takes_images_of_the_coordinators() -> None:
    here = arena_of(model())
    torch.nn.init.normal_(here.average.vectors[0])
    here.current.floats.fill_(0.25)
    here.slot(here.snapshots[2]).flat.vectors[0].fill_(3.0)
    there = arena_like(unpacked(packed(described(here))))
    for part in (Part.PARAMETERS, Part.AVERAGE, Part.FROZEN, Part.BUFFERS):
        image_of(there, part)[:] = image_of(here, part)
    image_of(there, Part.SNAPSHOT, there.snapshots[0])[:] = image_of(
        here, Part.SNAPSHOT, here.snapshots[2]
    )
    for name, value in here.parameters.views.items():
        assert torch.equal(there.parameters.views[name], value)
        assert torch.equal(there.average.views[name], here.average.views[name])
        assert (there.slot(there.snapshots[0]).flat.views[name] == 3.0).all()
    assert torch.equal(there.frozen.views["3.bias"], here.frozen.views["3.bias"])
    assert (there.current.floats == 0.25).all()


def test_a_result_comes_back_into_the_slot_that_was_lent_for_it() -> None:
    here = arena_of(model(), on_snapshots=False)
    there = arena_like(unpacked(packed(described(here))))
    assert (there.slots, len(there.snapshots)) == (2, 0)
    there.slot(0).flat.vectors[0].copy_(torch.arange(here.parameters.vectors[0].numel()))
    there.slot(0).floats.fill_(0.5)
    image_of(here, Part.RESULT, 5)[:] = image_of(there, Part.RESULT, 0)
    assert torch.equal(here.slot(5).flat.vectors[0], there.slot(0).flat.vectors[0])
    assert (here.slot(5).floats == 0.5).all()
    assert not here.slot(4).flat.vectors[0].any()


def test_what_an_update_changes_is_another_version() -> None:
    net = model()
    here = arena_of(net)
    before = here.published
    from quorate.replica.buffers import Buffers

    here.publish(Buffers(net, ()))
    assert here.published == before + 1


def test_what_a_worker_elsewhere_is_at_is_told_by_this_hosts_clock() -> None:
    there, here = Timesheet(bytearray(Timesheet.SIZE)), Timesheet(bytearray(Timesheet.SIZE))
    there.tell("waiting")
    there.tell("fetching", 3, 1)
    there.tell("forward", 3, 1)
    doing = there.read()
    age_s = time.monotonic() - doing.since
    sent = unpacked(packed({"doing": doing._replace(since=age_s)}))["doing"]
    received = Doing(*sent)
    here.take(received._replace(since=time.monotonic() - received.since))
    told = here.read()
    assert (told.phase, told.step, told.shard, told.shards) == ("forward", 3, 1, 1)
    assert abs(told.since - doing.since) < 0.5
    assert told.seconds["fetching"] == doing.seconds["fetching"]
    assert 0.0 <= told.seconds["forward"] - doing.seconds["forward"] < 0.5


def test_a_node_with_another_script_is_refused_with_both(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    script = Script(str(path), None, (), str(tmp_path), None)
    here = same_everywhere(script)
    assert difference(here, same_everywhere(script)) is None
    path.write_text("print(2)\n")
    other = difference(here, same_everywhere(script))
    assert other is not None
    assert f"the script {path}" in other
    assert "expected" in other
    path.unlink()
    assert "got not there" in str(difference(here, same_everywhere(script)))
    gone = {**here, "the torch build": "2.9.0"}
    assert "the torch build" in str(difference(here, gone))


def test_bytes_in_a_message_travel_as_they_are() -> None:
    """Also within what is in it, and several of them, and none at all."""
    bytes_ = bytes(range(256))
    for message in (
        {"message": {"kind": "done", "blob": bytes_, "tensors": [["", "int64", [32]]]}},
        {"first": bytes_, "none": b"", "second": [b"\n", {"third": bytes_[::-1]}]},
        {"kind": "close", "job": 1},
    ):
        assert unpacked(packed(message)) == message
    with pytest.raises(TypeError, match="no message has a set"):
        packed({"kind": {1}})
