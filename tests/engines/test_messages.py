"""Messages arrive as they were sent: plain values, tensors, exceptions of user code."""

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quorate.engines.collective.heartbeats import Heartbeat
from quorate.engines.messages import pack, unpack, unpack_apart
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.script import Script
from quorate.engines.worker_status import Doing
from quorate.replica.sparse.rows import Rows

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary()
TEXTS = st.text(st.characters(codec=None))  # with lone surrogates
VALUES = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS | st.integers(-9, 9), inner),
    max_leaves=8,
)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@given(VALUES)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    assert unpack(pack({"it": value})) == {"it": value}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_arrive_in_aligned_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.randint(0, 2, shape).to(dtype).mT if len(shape) == 2 else torch.ones(shape)
    arrived = unpack(pack(["x", {"deep": [sent]}]))[1]["deep"][0]
    assert arrived.dtype == sent.dtype
    assert torch.equal(arrived, sent)
    assert arrived.data_ptr() % 64 == 0
    arrived.zero_()  # writable memory of the message
    packed = pack({3: [sent], "\ud800": {"deep": sent}}, apart := [])
    value, memory = unpack_apart(packed, torch.device("meta"))
    assert [*map(id, memory)] == [id(value[3][0]), id(value["\ud800"]["deep"])]
    assert [(m.dtype, m.shape) for m in memory] == [(s.dtype, s.shape) for s in apart]


def test_a_parameter_with_gaps_arrives_without_its_gradient() -> None:
    sent = nn.Parameter(torch.arange(6.0))[::2]
    assert unpack(pack(sent)).tolist() == [0.0, 2.0, 4.0]


def test_a_rank_is_in_its_phase_for_as_long_by_the_clock_of_whoever_hears_it() -> None:
    doing = Doing("forward", 7, 3, 50.0, {}, 1)
    beat = Heartbeat(1, "node7", "mark", 9, "cpu", doing, is_late=False, sent_at=52.0)
    assert beat.phase_s == 2.0
    assert beat.status(1000.0, own_mark="mark", show_host=True).since == 998.0


def test_exceptions_keep_their_type_and_notes_and_foreign_classes_are_refused() -> None:
    error = ValueError("no such label \udc80")
    error.add_note("shard 3")
    arrived = unpack(pack({"error": error, "loss": math.nan}))
    assert math.isnan(arrived["loss"])
    assert type(arrived["error"]) is ValueError
    assert str(arrived["error"]) == str(error)
    assert arrived["error"].__notes__ == ["shard 3"]
    with pytest.raises(TypeError, match="a message cannot hold a object"):
        pack([object()])
    with pytest.raises(msgspec.DecodeError):
        unpack(b"\xc1")


def test_messages_arrive_as_objects_of_their_classes_whatever_the_texts() -> None:
    rows = {"embedding": Rows(torch.tensor([3]), torch.ones(1, 2))}
    done = messages.ShardsDone([messages.SlotSum(2.0, {"loss": 3.0}, rows=rows)], job=1, ticket=7)
    arrived = messages.READER.unpack(pack(done))
    assert isinstance(arrived, messages.ShardsDone)
    assert torch.equal(arrived.results[0].rows["embedding"].values, torch.ones(1, 2))
    # A path outside of UTF-8, and a seed beyond 64 bits.
    script = Script("/\udc80.py", None, ("a",), "/", {"seed": 2**80})
    start = messages.StartWorker(1, script, None, messages.OwnProcess(False, [(1, 2)]))
    assert messages.READER.unpack(pack(start)) == start
    with pytest.raises(msgspec.ValidationError):
        messages.READER.unpack(pack({"kind": "none"}))
