"""Runs of a rank's slice: together those of all ranks are each parameter, once."""

from __future__ import annotations

import random

import torch

from quorate.replica.flat import Layout
from quorate.training.collective.rows import BLOCK_BYTES, Part, Row, chunks, parts
from quorate.training.optimizing.runs import is_by_rows, runs
from quorate.transports.collective.slices import Piece


def cut(chance: random.Random, size: int, ranks: int) -> list[list[Piece]]:
    """Stretches of a vector of any lengths, dealt to ranks."""
    ends = sorted({size, *(chance.randrange(1, size) for _ in range(chance.randrange(0, 9)))})
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for start, end in zip([0, *ends], ends, strict=False):
        pieces[chance.randrange(ranks)].append(Piece(start, end - start, 0))
    return pieces


def test_runs_and_blocks_cover_each_byte_of_a_file_once() -> None:
    chance = random.Random(0)
    for _ in range(100):
        shapes = [
            chance.choice([(), (1,), (3, 5), (0, 4), (70_000,), (40, 3_000)]) for _ in range(6)
        ]
        layout = Layout((str(number), torch.empty(s)) for number, s in enumerate(shapes))
        sections = [*layout.sections.values()]
        size, ranks = layout.sizes[0], chance.randrange(1, 5)
        if size < 2:
            continue
        starts, at = [], 4 * chance.randrange(2, 99)
        for section in sections:
            starts.append(at)
            at += 4 * torch.Size(section.shape).numel()
        row = Row(0, "exp_avg", "float32", starts)
        written = torch.zeros(at, dtype=torch.uint8)
        writers: dict[int, int] = {}  # of blocks, those that are not rank 0
        for rank, places in enumerate(cut(chance, size, ranks)):
            found = [*runs(places, sections)]
            for blocks in (True, False):
                of: list[Part] = []
                for chunk in chunks(
                    parts([row], lambda _, r=found: r, [sections], blocks=blocks, beside=not blocks)
                ):
                    of += chunk
                for part in of:
                    assert 0 <= part.run.start <= places[part.run.piece].length - part.run.length
                    written[part.at : part.at + part.nbytes] += 1
                    if blocks:
                        for block in range(part.at, part.at + part.nbytes, BLOCK_BYTES):
                            assert writers.setdefault(block, rank) == rank
                        assert part.at % BLOCK_BYTES == part.nbytes % BLOCK_BYTES == 0
        assert bool((written[starts[0] :] == 1).all())


def test_what_lies_row_by_row() -> None:
    shapes = torch.zeros(2, 3, 4, 5), torch.zeros(4, 1, 6), torch.tensor(1.0), torch.zeros(0, 3)
    others = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(3, 4).t()
    layout = Layout((str(number), tensor) for number, tensor in enumerate((*shapes, *others)))
    found = [is_by_rows(section) for section in layout.sections.values()]
    assert found == [True] * len(shapes) + [False] * len(others)
