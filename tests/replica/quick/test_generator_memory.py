"""A generator's place is read from its memory: whatever is drawn shows, and nothing else does."""

from __future__ import annotations

import random

import pytest
import torch

from quorate.replica.quick import generator_memory
from quorate.replica.shared import generators


def test_this_torch_has_its_generator_where_it_is_expected() -> None:
    assert generator_memory.reader(torch.default_generator) is not None


def test_another_layout_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_memory, "_FIRST", 104)
    assert generator_memory.reader(torch.Generator()) is None
    monkeypatch.undo()
    monkeypatch.setattr(generator_memory, "_DOUBLE_FLAG", 8)
    assert generator_memory.reader(torch.Generator()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_marks_differ_where_states_do(dtype: torch.dtype) -> None:
    generator, order = torch.Generator().manual_seed(3), random.Random(0)
    read = generator_memory.reader(generator)
    assert read is not None
    draws = (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_)
    before, state = read(), generator.get_state()
    for _ in range(400):
        assert read() == before  # to read draws nothing
        order.choice(draws)(
            torch.empty(order.choice((1, 3, 16, 700)), dtype=dtype), generator=generator
        )
        after = read()
        assert after is None or after != before
        assert not generator.get_state().equal(state)
        generator.set_state(state)
        assert read() == before
        generator.set_state(generator.get_state())
        torch.empty(order.choice((1, 5))).uniform_(generator=generator)
        before, state = read(), generator.get_state()


def test_a_script_may_put_another_in_the_place_of_the_default_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, other = generators.torch_mark(), torch.Generator().manual_seed(9)
    monkeypatch.setattr(torch, "default_generator", other)
    mark = generators.torch_mark()
    assert mark != before
    torch.rand(1, generator=other)
    assert generators.torch_mark() != mark
    monkeypatch.undo()
    assert generators.torch_mark() == before
