"""What goes between two ranks at a time: short pieces, in the order of what they are of."""

from __future__ import annotations

import torch

from quorate.transports.collective.ranks import MESSAGE_BYTES, rounds

LONG = MESSAGE_BYTES // 4  # elements of float32


def test_tensors_go_in_short_pieces_to_all_ranks_at_once() -> None:
    one, two = torch.arange(2.5 * LONG), torch.arange(10.0)
    three = torch.arange(LONG, dtype=torch.float64).view(2, -1)
    found = rounds([(1, one), (2, two), (2, three)])
    assert [[rank for rank, _ in each] for each in found] == [[1, 2], [1, 2], [1, 2]]
    pieces = [piece for each in found for _, piece in each]
    assert max(piece.nbytes for piece in pieces) <= MESSAGE_BYTES
    for rank, whole in ((1, one), (2, torch.cat([two.double(), three.view(-1)]))):
        to = [piece for each in found for r, piece in each if r == rank]
        assert torch.equal(torch.cat([piece.to(whole.dtype) for piece in to]), whole)


def test_pieces_are_views() -> None:
    value = torch.zeros(2 * LONG)
    for each in rounds([(0, value)]):
        for _, piece in each:
            piece.fill_(1.0)
    assert value.eq(1.0).all()


def test_nothing_takes_no_round() -> None:
    assert rounds([]) == []
