"""A run killed inside its saves, at one system call after another, and resumed each time.

    PYTHONPATH=tests python tests/scripts/killed_in_saves.py FOLDER KILLS

Each step is saved twice, as the best step and as a due step, and a single checkpoint is kept. Every
run is a fork of this process, with torch imported. A run counts the system calls of its saves
(``rename``, ``mkdir``, ``write``, ``fsync``, ...), and sends itself SIGKILL before a call of some
number. KILLS numbers are spread over all calls; 0: a kill at each. Every fifth run is resumed.

After each kill all checkpoints are sound, and the newest is no older than after an earlier kill.
The resumed run ends with the undisturbed digest.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by torch with the first optimizer: 2 s in each process
from support.runs import inspected
from support.system_calls import forked
from torch import nn

import quorate

STEPS = 4
ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
SAVER = "quorate-checkpoints_0"  # the saving thread


def train(run_dir: Path) -> None:
    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return (model(rows) - 1).square().mean()  # falls at each step: each is the best

    quorate.Trainer(
        lambda: nn.Linear(4, 1),
        loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5),
        batch_size=12,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(1, engine="towers"),
        run_dir=quorate.RunDir(run_dir, keep=1, save_every_steps=1, summary_every_s=None),
    ).fit(ROWS, steps=STEPS, validation=quorate.Validation(ROWS, every_steps=1, best="min:loss"))


def in_a_fork(run_dir: Path, last: int = 0) -> tuple[int, int]:
    """Train to the end, or to a call of the saving thread; see ``forked``."""

    def quietly() -> None:
        said = os.open(run_dir.with_name("said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        train(run_dir)

    return forked(quietly, SAVER, last)


def digest_of(run_dir: Path) -> str:
    facts = inspected(run_dir)
    assert facts["global_step"] == STEPS
    return str(facts["digest"])


def checkpoints(run_dir: Path) -> list[dict[str, Any]]:
    try:
        listed: list[dict[str, Any]] = inspected(run_dir)["checkpoints"]
    except AssertionError:  # there are none yet
        return []
    return listed


def main(folder: Path, kills: int) -> None:
    code, calls = in_a_fork(folder / "alone")
    assert code == 0, (folder / "said").read_text()
    undisturbed, newest = digest_of(folder / "alone"), 0
    for count, number in enumerate(range(1, calls + 1, calls // kills if kills else 1)):
        run_dir = folder / str(number)
        assert in_a_fork(run_dir, number)[0] == -signal.SIGKILL, number
        listed = checkpoints(run_dir)
        assert all(one["is_sound"] for one in listed), (number, listed)
        before, newest = newest, max((one["global_step"] for one in listed), default=0)
        assert before <= newest <= STEPS, (number, listed)
        if count % 5 == 0:
            assert in_a_fork(run_dir)[0] == 0, (number, (folder / "said").read_text())
            assert digest_of(run_dir) == undisturbed, number
            left = {path.name for path in (run_dir / "checkpoints").iterdir()}
            assert left <= {"step-000000000003", "step-000000000004"}, (number, left)
        shutil.rmtree(run_dir)
    assert newest >= 3


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
