"""Steps in several passes, and gradients by rows: on processes, with kills, and where refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import References
from support.runs import command, run
from support.scenarios import Scenario, check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]

KILLS = "engine=processes:2 steps=6 pause=10 fault=kill@forward+kill@backward"
KILLED = [
    # An optimizer that has gradients computed again at other parameters.
    f"model=mlp optimizer=lbfgs shards=3 {KILLS}",
    # A loss over the whole batch: shards are represented, then gradients go back through them.
    f"model=contrastive optimizer=adam options=ema+clip data=short shards=4 {KILLS}",
    f"model=sparse optimizer=adagrad options=ema+clip data=short shards=4 {KILLS}",
]


@pytest.mark.parametrize("line", KILLED)
def test_workers_that_are_killed_change_nothing(line: str, references: References) -> None:
    check(Scenario(line, says=["was killed by signal 9"]), references)


def test_ranks_refuse_gradients_by_rows(references: References) -> None:
    says = ["expected one that hands over the gradient of", "leave sparse=True out"]
    line = "model=sparse optimizer=adagrad data=short shards=4 engine=ranks:2 steps=4"
    check(Scenario(line, codes=[2], says=says), references)


ON_RAY = """
import sys, torch, quorate
from torch import nn
makes = {"Adafactor": torch.optim.Adafactor, "sparse": torch.optim.SGD}
trainer = quorate.Trainer(
    lambda: nn.Embedding(9, 4, sparse=sys.argv[1] == "sparse"),
    lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda params: makes[sys.argv[1]](params, lr=0.1), batch_size=4, shards=2,
)
trainer.fit(torch.utils.data.TensorDataset(torch.arange(8)), steps=2)
"""


@pytest.mark.parametrize(
    ("name", "servers", "said"),
    [
        ("sparse", (), "engine: got 'ray', expected one that hands over the gradient of"),
        ("Adafactor", ("--servers", "1"), "servers: got 'Adafactor', expected"),
    ],
)
def test_ray_refuses_gradients_by_rows_and_its_servers_optimizers_of_whole_tensors(
    name: str, servers: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="quorate's extra ray is not installed")
    script = tmp_path / "script.py"
    script.write_text(ON_RAY)
    options = ("--engine", "ray", "--workers", "1", *servers)
    ended = run(command(script, name, options=options))
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.said
    assert said in ended.err
