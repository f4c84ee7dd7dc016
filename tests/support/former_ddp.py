"""Scripts that once trained with DDP: lines of theirs, and what becomes of each.

Each case is put into one small script: lines before ``Trainer`` is made, lines of the loss, and
lines after ``fit``. It has the same bits on every engine and number of workers; or one line names
the call. As a program: all of them on one tower, for ``on_a_tower``.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from support.runs import Ended, command, inspected, run, torchrun

import quorate
from quorate.__main__ import main as quorate_main

TESTS = Path(__file__).parents[1]
SOURCE = Path(quorate.__file__).parents[1]
TORCHRUN = "torchrun 2"
HERE = "here"  # on one tower, in this process
TOWER = ("--engine", "towers", "--workers", "1")
WAYS = {
    "2 processes": ("--engine", "processes", "--workers", "2"),
    "2 ranks": ("--engine", "collective", "--workers", "2"),
    TORCHRUN: (),
}
SAME, SAID, REFUSED, WRONG = "same", "said", "refused", "WRONG"


@dataclass(frozen=True)
class Former:
    """Lines of a former DDP script.

    Args:
        top: before ``Trainer`` is made.
        loss: in the loss function, which has ``m``, ``x``, ``y`` and ``found``.
        end: after ``fit``.
        names: what the one line has to name wherever the script is refused, or its bits are in
            doubt; "": the bits are the same everywhere, and nothing is in doubt.
        torchrun: the same for ranks of torchrun, where that differs.
        before_trainer: whether a call is refused before a ``Trainer`` is made. Python shows it
            under torchrun then, as quorate has no part in the program yet.
        model, data, rate: expressions.
    """

    top: str = ""
    loss: str = ""
    end: str = ""
    names: str = ""
    torchrun: str | None = None
    before_trainer: bool = False
    model: str = "lambda: nn.Linear(4, 2)"
    data: str = "data"
    rate: str = "0.1"

    def script(self) -> str:
        """Return the whole program."""
        inner = "".join(f"    {line}\n" for line in self.loss.splitlines())
        return SCRIPT.format(inner=inner, **vars(self))


SCRIPT = """\
import os, sys
import quorate
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
run_dir = sys.argv[1]
{top}

def loss(m, batch):
    x, y = batch
    found = F.cross_entropy(m(x), y)
{inner}    return found

trainer = quorate.Trainer(
    {model}, loss, optimizer=lambda p: torch.optim.SGD(p, lr={rate}),
    batch_size=12, shards=4, run_dir=run_dir, devices="cpu",
)
trainer.fit({data}, epochs=1)
{end}
"""

READS_RANK = 'int(os.environ.get("RANK", "0"))'
READS_SIZE = 'int(os.environ.get("WORLD_SIZE", "1"))'

FORMER: Mapping[str, Former] = {
    # --- guarded: the same bits -------------------------------------------------------------------
    "loss_divided_by_guarded_world_size": Former(
        loss="found = found / (dist.get_world_size() if dist.is_initialized() else 1)"
    ),
    "synchronised_batch_normalisation": Former(
        model="lambda: nn.SyncBatchNorm.convert_sync_batchnorm("
        "nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))"
    ),
    "first_rank_prints": Former(
        f'rank = {READS_RANK}\nif rank == 0:\n    print("begins")',
        end='rank == 0 and print("ends")',
    ),
    "weights_by_seed_and_rank": Former(
        f"torch.manual_seed(7 + {READS_RANK})\nnet = nn.Linear(4, 2)", model="net"
    ),
    "sampler_with_its_numbers": Former(
        data="DataLoader(data, batch_size=12, sampler=DistributedSampler("
        "data, num_replicas=2, rank=0, shuffle=False))"
    ),
    # --- the environment --------------------------------------------------------------------------
    "rank_read_in_the_loss": Former(loss=f"found = found * (1 + {READS_RANK})", torchrun="RANK"),
    "size_read_at_the_top": Former(
        f"size = {READS_SIZE}", rate="0.1 * size", torchrun="WORLD_SIZE"
    ),
    "rows_by_rank": Former(
        f"own = torch.utils.data.Subset(data, range({READS_RANK}, 48, {READS_SIZE}))",
        data="own",
        torchrun="dataset",
    ),
    # --- not guarded: one line names the call -----------------------------------------------------
    "rank_at_the_top": Former("rank = dist.get_rank()", names="get_rank()", before_trainer=True),
    "barrier_in_the_loss": Former(loss="dist.barrier()", names="barrier()"),
    "sampler_without_numbers": Former(
        data="DataLoader(data, batch_size=12, sampler=DistributedSampler(data))",
        names="DistributedSampler()",
    ),
    "wrapped_model": Former(
        "net = DDP(nn.Linear(4, 2), find_unused_parameters=True)",
        model="net",
        names="DistributedDataParallel()",
        before_trainer=True,
    ),
    "group_at_the_start": Former('dist.init_process_group("gloo")', names="init_process_group()"),
    "group_in_the_loss": Former(
        loss='if not dist.is_initialized():\n    dist.init_process_group("gloo")\n'
        "found = found / dist.get_world_size()",
        names="init_process_group()",
    ),
    "destroyed_at_the_end": Former(
        end="dist.destroy_process_group()", names="destroy_process_group()"
    ),
}


class Outcome(NamedTuple):
    """What became of one way of running a case."""

    kind: str
    text: str  # its digest, its doubt, its line; or what is wrong


def outcomes(case: Former, here: Outcome) -> dict[str, Outcome]:
    """Run a case in all ways; ``here`` is what became of it on a tower."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(case.script())
        found = {HERE: here}
        for way, options in WAYS.items():
            run_dir = Path(folder, way.replace(" ", "-"))
            names = case.torchrun if way == TORCHRUN and case.torchrun is not None else case.names
            shows = way == TORCHRUN and case.before_trainer  # Python does
            found[way] = _outcome(way, script, run_dir, options, names, shows_trace=shows)
        digests = {outcome.text for outcome in found.values() if outcome.kind == SAME}
        return {
            way: Outcome(WRONG, f"silently other bits: {outcome.text:.8}")
            if outcome.kind == SAME and len(digests) > 1
            else outcome
            for way, outcome in found.items()
        }


def on_a_tower() -> dict[str, list[str]]:
    """Run all cases on one tower, one after the other in a process of their own: outcomes.

    Cases change torch, and how Python shows exceptions.
    """
    words = [sys.executable, "-m", "support.former_ddp"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, (TESTS, SOURCE))])}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=True, cwd=TESTS)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def _all_here() -> dict[str, Outcome]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        (script := Path(folder) / "script.py").touch()
        for name, case in FORMER.items():
            script.write_text(case.script())
            run_dir, sgd = Path(folder, name), torch.optim.SGD
            found[name] = _outcome(HERE, script, run_dir, TOWER, case.names, shows_trace=False)
            torch.optim.SGD = sgd  # type: ignore[misc]
    return found


def _run_here(words: list[str]) -> Ended:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = quorate_main(words[3:])
        except Exception as error:  # as an interpreter would show it
            code = 2
            with suppress(SystemExit):
                sys.excepthook(type(error), error, error.__traceback__)
    return Ended(code, out.getvalue(), err.getvalue())


def _outcome(
    way: str,
    script: Path,
    run_dir: Path,
    options: tuple[str, ...],
    names: str,
    *,
    shows_trace: bool,
) -> Outcome:
    words = command(script, str(run_dir), options=options)
    if way == TORCHRUN:
        words = torchrun(2, str(script), str(run_dir))
    try:
        ended = _run_here(words) if way == HERE else run(words)
    except subprocess.TimeoutExpired:
        return Outcome(WRONG, "it hangs")
    if ended.code != 0:
        if shows_trace and "Default process group has not been initialized" in ended.err:
            return Outcome(REFUSED, "by Python's traceback, before there is a Trainer")
        # A rank that was refused first may be all that torchrun's report has: it ends the others.
        told = [line.strip().removeprefix("traceback : ") for line in ended.err.splitlines()]
        lines = [*{line: None for line in told if line.startswith("quorate: ")}]
        if way != TORCHRUN and len(ended.err.splitlines()) != 1:
            return Outcome(WRONG, f"more than a line: {ended.err[-300:]}")
        if len(lines) != 1 or not names or names not in lines[0]:
            return Outcome(WRONG, f"{len(lines)} lines: {ended.err[-300:]}")
        return Outcome(REFUSED, lines[0])
    facts = inspected(run_dir)
    if not names and not facts["doubts"]:
        return Outcome(SAME, facts["digest"])
    if names and facts["doubts"] and names in facts["doubts"][0]:
        return Outcome(SAID, facts["doubts"][0])
    return Outcome(WRONG, f"doubts {facts['doubts']}")


if __name__ == "__main__":
    print(json.dumps(_all_here()))
