"""A batch moved to the host is there when ``move`` returns; a message of a stage arrives whole."""

import torch

from quorate.engines.stages.links import DeviceCopier, received
from quorate.replica.transfer import move

SIZE = 1 << 16


def test_a_batch_is_read_after_it_has_arrived() -> None:
    for value in range(20):
        values = torch.full((SIZE,), float(value), device="sim:0")
        for _ in range(20):
            values.mul_(1)
        found = move([values], torch.device("cpu"))[0]
        assert found[-1] == value


def test_memory_that_is_handed_over_is_used_again_after_the_copy() -> None:
    copier = DeviceCopier(torch.device("sim:1"))
    for value in range(20):
        values = torch.full((SIZE,), float(value), device="sim:0")
        handed = copier.over(values)
        del values
        torch.full((SIZE,), -1.0, device="sim:0")  # may get the same memory
        assert received(handed)[-1] == value
