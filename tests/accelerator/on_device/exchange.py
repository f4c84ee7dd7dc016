"""The stream of an exchange waits for the writers of its vectors, and readers wait for it."""

from types import SimpleNamespace
from typing import Any

import torch

from quorate.engines.collective.exchange import GradientExchange

DEVICE = torch.device("sim:0")


def test_a_sum_is_exchanged_after_it_was_written_and_before_it_is_read() -> None:
    exchange: Any = object.__new__(GradientExchange)  # of no ranks
    exchange._stream, exchange.ranks = torch.Stream(DEVICE), SimpleNamespace(device=DEVICE)
    outbox, total = torch.zeros(4096, device=DEVICE), torch.zeros(4096, device=DEVICE)
    for step in range(5):
        outbox.fill_(step)
        with exchange._beside():
            total.copy_(outbox)
        outbox.mul_(2)
        assert total.sum().item() == 4096 * step
