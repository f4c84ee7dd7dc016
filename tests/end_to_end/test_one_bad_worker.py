"""A worker in a worse state than the rest: the run goes on without the worker, and says so."""

import re
from pathlib import Path

import pytest
from support.memory_group import inside, memory_group
from support.references import References
from support.runs import command, run
from support.scenarios import Scenario, check

pytestmark = pytest.mark.slow


def test_one_that_raises_in_every_shard_is_named_once_and_at_the_end(
    references: References,
) -> None:
    bad = Scenario("model=mlp engine=processes:2 steps=20 pause=5 fault=raise@one:1")
    (part,) = check(bad, references).parts
    named = [line for line in part.out.splitlines() if "MineError" in line]
    assert len(named) == 2, part.out
    assert re.match(r"worker \d raised .*MineError: 3 and 4 in step ", named[0]), named
    assert named[0].endswith("; another worker computes it")
    assert re.fullmatch(
        r"worker (\d) raised in \d+ shards of training, which other workers computed; the last "
        r"error was .*MineError: 3 and 4.*; look for what is different on worker \1",
        named[1],
    ), named


HUNGRY = """
import torch, quorate
kept = []
def loss(model, batch):
    if quorate.is_worker() and model.training:
        kept.extend(torch.ones(10 << 20, dtype=torch.uint8) for _ in range(400))
    return model(batch).square().mean()
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=4)
trainer.fit(torch.ones(80, 3), epochs=1, shuffle=False)
"""


def test_workers_that_are_always_out_of_memory_are_given_up_soon(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(HUNGRY)
    with memory_group(1 << 30) as group:
        ended = run(inside(group, command(script, options=("--workers", "2"))))
    assert ended.code == 1, ended.said
    assert "no worker is left" in ended.err, ended.said
    assert "because memory ran out (use fewer workers" in ended.err, ended.said
    assert ended.said.count("; another is starting") <= 2 * 3
