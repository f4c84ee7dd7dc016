"""Scripts that once trained with DDP: lines of such scripts, and the outcome of each.

Each case is put into a small script: lines before ``Trainer`` is made, lines of the loss, and lines
after ``fit``. The script has the same bits on every engine and number of workers; or a line names
the call.
"""

import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support.runs import TOWER, command, inspected, run, torchrun

TORCHRUN = "torchrun 2"
ONE_TOWER = "1 tower"
WAYS = {
    ONE_TOWER: TOWER,
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
        loss: in the loss function, with ``m``, ``x``, ``y`` and ``found``.
        end: after ``fit``.
        names: the name required in the line wherever the script is refused, or its bits are in
            doubt; "": the bits are the same everywhere, and nothing is in doubt.
        torchrun: the same for ranks of torchrun, if different.
        before_trainer: whether a call is refused before a ``Trainer`` is made. Under torchrun
            Python then shows the refusal, as quorate has no part in the program yet.
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
    # --- not guarded: a line names the call -------------------------------------------------------
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
    """The outcome of a way of running a case."""

    kind: str
    text: str  # the digest, the doubt, the line; or the mistake


def outcomes(case: Former, ways: Iterable[str]) -> dict[str, Outcome]:
    """Run a case in some ways."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(case.script())
        found = {
            way: _outcome(way, case, script, Path(folder, way.replace(" ", "-"))) for way in ways
        }
    digests = {outcome.text for outcome in found.values() if outcome.kind == SAME}
    return {
        way: Outcome(WRONG, f"silently other bits: {outcome.text:.8}")
        if outcome.kind == SAME and len(digests) > 1
        else outcome
        for way, outcome in found.items()
    }


def _outcome(way: str, case: Former, script: Path, run_dir: Path) -> Outcome:
    words, names = command(script, str(run_dir), options=WAYS[way]), case.names
    if way == TORCHRUN:
        words = torchrun(2, str(script), str(run_dir))
        names = case.names if case.torchrun is None else case.torchrun
    try:
        ended = run(words)
    except subprocess.TimeoutExpired:
        return Outcome(WRONG, "it hangs")
    if ended.code != 0:
        # Python shows refusals before there is a Trainer.
        is_before = way == TORCHRUN and case.before_trainer
        if is_before and "Default process group has not been initialized" in ended.err:
            return Outcome(REFUSED, "by Python's traceback, before there is a Trainer")
        # A rank refused first may be all of torchrun's report: torchrun ends the remaining ranks.
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
