"""Checkpoints of commit 1ed5e4f, in the middle of an epoch, resumed by every later version.

``tests/fixtures/checkpoints-1ed5e4f/NAME`` is a run directory as left by the commit. A run resumed
from the directory ends with the bits of a run without an interruption. ``digests/<kind>.json`` has
the bits by kind of processor; ``tests/compare_with_base.py --record`` writes the digests.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from support.trainings import golden
from support.trainings.configuration import parse
from support.trainings.engines import ENGINES
from support.trainings.trees import CURRENT, Tree

SCRIPT = CURRENT / "tests" / "scripts" / "checkpointed.py"
FOLDER = CURRENT / "tests" / "fixtures" / "checkpoints-1ed5e4f"
STEPS = 11  # two epochs of five updates, and one update more
QUIET = ("--save-every-s", "1e9", "--summary-every-s", "1e9")
FACTS = ("digest", "averaged_digest", "global_step")

# Each has the engine of its making, and was saved after update ``at``.
CHECKPOINTS = {
    name: parse(line)
    for name, line in {
        "adam": "model=mlp optimizer=adam options=clip+schedule data=short engine=inline",
        "lbfgs": "model=linear optimizer=lbfgs data=plain shards=3 engine=inline",
        "average": "model=convolution optimizer=adamw options=ema data=weighted engine=towers:2",
        "phases": "model=phases optimizer=adam options=ema+clip data=short shards=2 engine=inline",
        "tables": "model=sparse optimizer=adagrad options=clip data=sampled engine=processes:2",
        "ranks": "model=convolution optimizer=adam options=ema data=short engine=ranks:2",
        "servers": "model=frozen optimizer=adam options=ema data=short",  # of a Ray cluster
        "stages": "model=mlp optimizer=adamw options=ema+schedule data=short engine=stages",
        "skipped": "model=mlp optimizer=sgd options=ema data=short engine=inline",
        "stream": "model=linear optimizer=rmsprop data=stream engine=inline at=8",
        "shared": "model=linear optimizer=sgd data=short engine=processes:2",
        "callbacks": "model=mlp optimizer=adam options=validation data=short engine=inline at=7",
    }.items()
}


class Result(NamedTuple):
    """The end of a run."""

    resumed: str  # the line with the place of the resume; "" without a resume
    facts: dict[str, Any]  # ``FACTS`` and state outside of the model


def resume(tree: Tree, name: str, folder: Path, engine: str = "inline") -> Result:
    """Go on from a copy of a stored checkpoint with the code of a tree, in the folder.

    Raises:
        RuntimeError: the command fails, or leaves processes.
    """
    run_dir = folder / "run"
    shutil.copytree(FOLDER / name, run_dir)
    words = [*ENGINES[engine], *QUIET, "--run-dir", str(run_dir), str(SCRIPT), name, str(folder)]
    ended = tree.run(["run", *words])
    inspected = tree.run(["inspect", "--json", str(run_dir)])
    if ended.code != 0 or inspected.code != 0 or ended.left:
        raise RuntimeError(f"{name}: {ended}\n{inspected}")
    found = json.loads(inspected.out)
    lines = [line for line in ended.out.splitlines() if "resumed" in line]
    facts = {fact: found[fact] for fact in FACTS if fact in found}
    return Result("".join(lines), {**facts, "state": json.loads(ended.out.splitlines()[-1])})


def digests_file() -> Path:
    """Return the file for the results on this kind of processor."""
    return FOLDER / "digests" / golden.file_of(golden.processor()).name
