"""Workers in stages, as processes of a run: one digest, also after kills; what a run goes on as."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.memory_group import inside, memory_group
from support.references import References
from support.runs import command, digests, inspected, run, run_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="stages are for Linux"),
]

STAGES = ("--devices", "cpu+cpu", "--split", "embedding")


def test_one_digest_in_one_piece_and_in_stages(tmp_path: Path, references: References) -> None:
    variants = {
        "two workers": (*STAGES, "--workers", "2"),
        "three stages": (
            *("--devices", "cpu+cpu+cpu", "--split", "embedding,dropout"),
            *("--pipeline", "zero-bubble"),
        ),
    }
    ended = run_all(
        {
            name: command("everything.py", options=(*options, "--run-dir", str(tmp_path / name)))
            for name, options in variants.items()
        }
    )
    # Begun in one piece, it goes on in stages.
    first = command("everything.py", "0", "7", options=("--run-dir", str(tmp_path / "resumed")))
    then = command("everything.py", options=(*STAGES, "--run-dir", str(tmp_path / "resumed")))
    ended |= {"first": run(first), "then": run(then)}
    expected = references.on_a_tower("everything.py").digests
    for name, each in ended.items():
        assert each.code == 0, (name, each.said)
    for name in (*variants, "resumed"):
        assert digests(tmp_path / name) == expected, name
    assert inspected(tmp_path / "two workers")["devices"] == ["cpu+cpu"]


def test_stages_that_are_killed_or_hang(tmp_path: Path) -> None:
    def words(name: str, phase: str, *options: str) -> list[str]:
        marks = tmp_path / f"marks of {name}"
        marks.mkdir()
        run_dir = ("--run-dir", str(tmp_path / name))
        return command("in_stages.py", phase, str(marks), options=(*options, *run_dir))

    phases = ("forward", "backward")  # others in tests/transports/test_stages.py
    hangs = ("hang", "stop")  # the worker is replaced, with all of its stages
    late = ("--engine", "processes", "--worker-timeout-s", "8")
    ended = run_all(
        {"whole": words("whole", "none")}
        | {p: words(p, p, *STAGES) for p in phases}
        | {p: words(p, p, *STAGES, *late) for p in hangs}
    )
    for name, each in ended.items():
        assert each.code == 0, (name, each.said)
        assert digests(tmp_path / name) == digests(tmp_path / "whole"), name
    for phase in hangs:
        said = ended[phase].said
        assert re.search(r"no answer for \d+ s in step 0, .* in stage 1 for .*; another is", said)
    for phase in phases:
        assert len([*(tmp_path / f"marks of {phase}").iterdir()]) == 2
        assert (
            "the process of stage 1 of a replica was killed by signal 9 (SIGKILL)"
            in ended[phase].said
        )


HUNGRY = """
import sys
from multiprocessing import current_process
from pathlib import Path
import torch, quorate
from torch import nn
from torch.utils.data import TensorDataset
marks = Path(sys.argv[1])
def loss(model, batch):
    output = model(batch[0])
    if current_process().name == "quorate-stage-1":
        for mark in range(int(sys.argv[2])):
            try:
                (marks / str(mark)).touch(exist_ok=False)
            except FileExistsError:
                continue
            kept = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(1000)]
    return output.square().mean()
torch.manual_seed(0)
trainer = quorate.Trainer(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01), batch_size=8, shards=2)
trainer.fit(TensorDataset(torch.ones(24, 3)), epochs=1)
"""


def test_a_stage_whose_memory_has_run_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HUNGRY)

    def words(name: str, kills: int, *options: str) -> list[str]:
        (tmp_path / f"marks of {name}").mkdir()
        given = (str(tmp_path / f"marks of {name}"), str(kills))
        options = (*options, "--run-dir", str(tmp_path / name))
        return command(tmp_path / "script.py", *given, options=options)

    staged = ("--devices", "cpu+cpu", "--split", "1")
    whole = run(words("whole", 0))
    assert whole.code == 0, whole.said
    with memory_group(2 << 30) as group:
        once = run(inside(group, words("once", 1, *staged)))
        always = run(inside(group, words("always", 50, *staged)))
    how = (
        "was killed by the kernel (signal 9, SIGKILL), because memory ran out (use more shards, "
        "more devices, another cut with split, or a higher limit for the container)"
    )
    assert once.code == 0, once.said
    assert (
        f"the process of stage 1 of a replica {how}; the replica starts new processes" in once.said
    )
    assert digests(tmp_path / "once") == digests(tmp_path / "whole")
    assert always.code == 1, always.said
    assert re.search(
        rf"ended 3 times in one run .* of stage 1 of 2 .*{re.escape(how)}", always.said
    )
