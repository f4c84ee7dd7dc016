"""What `quorate plan` predicts of runs on this machine, beside what they do.

    python benchmarks/own_runs.py [--rounds 3] [--seconds 20] [--only WORD] [--json FILE]

The seed network, 256 rows as 4 shards of 64, on worker processes of one thread. One ``quorate bench
--workers 1 --costs`` is measured; from that alone examples/s are predicted: of 1 to 4 workers, more
than there are cores too; under each rule; with a worker that is 5 times slower, asleep, which
stands for a device of its own; with a worker killed every 5 s, in turn; with a checkpoint each
second. Then all of them run, in turn, and the order turns round in each round; those with kills for
40 s at least. Printed are the medians, and by how much the prediction is off. The bound is 10%.

With --device-s 0.2 each shard takes so much more, asleep, which stands for a device of its own: the
machine's cores are then not what is short, and it may be busy with something else.

--bench FILE takes a results.json that is there. --only takes cases whose name has the word in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

SHARDS, PER_SHARD, BOUND = 4, 64, 0.10
SLOWER, KILL_EVERY_S, SAVE_EVERY_S = 5.0, 5.0, 1.0
LEAST_KILLS = 8  # of a run with kills: one more or less, by where the run begins, is an eighth
HERE = Path(__file__).resolve()


class Case(NamedTuple):
    """A run."""

    workers: int
    rule: str = "sync"
    is_slow: bool = False  # the last worker
    kills: bool = False
    saves: bool = False

    @property
    def name(self) -> str:
        """What it is, in words."""
        words = [f"{self.workers} worker{'s' if self.workers > 1 else ''}", self.rule]
        words += ["one 5 times slower"] * self.is_slow
        words += ["a kill every 5 s"] * self.kills + ["a checkpoint each second"] * self.saves
        return ", ".join(words)


RULES = ("sync", "quorum:3", "async", "bounded:4")
CASES = (
    *(Case(workers) for workers in (1, 2, 3, 4)),
    *(Case(2, rule) for rule in RULES[1:]),
    *(Case(2, rule, is_slow=True) for rule in RULES),
    *(Case(workers, kills=True) for workers in (1, 2)),
    Case(2, "async", kills=True),
    *(Case(workers, saves=True) for workers in (1, 2)),
)


# --- the training ---------------------------------------------------------------------------------


def train(
    device_s: float, asleep_s: float, in_forward: float, slow: int | None, *, kills: bool
) -> None:
    """Train until somebody ends it: ``quorate bench`` and ``quorate run --profile`` do.

    Args:
        device_s: that each shard sleeps.
        asleep_s: that those of the slow worker sleep beside that.
        in_forward: share of it; the rest in backward.
        slow: its number.
        kills: a worker every 5 s.
    """
    from seed_network import Net, data, loss, sgd
    from torch.utils.data import TensorDataset

    import quorate
    from quorate.engines.processes.worker import here

    def slow_loss(model: Any, batch: Any) -> Any:
        worker = here()
        value = loss(model, batch)
        is_slow = worker is not None and worker.number == slow
        rest_s = device_s + asleep_s * is_slow
        if rest_s:
            first = value["loss"] if isinstance(value, dict) else value
            time.sleep(rest_s * in_forward)
            first.register_hook(lambda _: time.sleep(rest_s * (1 - in_forward)))
        return value

    trainer = quorate.Trainer(
        Net,
        slow_loss if device_s or slow is not None else loss,
        optimizer=sgd,
        batch_size=SHARDS * PER_SHARD,
        shards=SHARDS,
    )
    if kills and here() is None:
        threading.Thread(target=kill_in_turn, args=(trainer,), daemon=True).start()
    trainer.fit(TensorDataset(*data()), epochs=1_000_000)


def kill_in_turn(trainer: Any) -> None:
    """Kill a worker every 5 s."""
    for number in range(1_000_000):
        time.sleep(KILL_EVERY_S)
        alive = [w.pid for w in trainer.workers if w.pid is not None and w.phase != "starting"]
        if alive:
            with suppress(ProcessLookupError):
                os.kill(alive[number % len(alive)], signal.SIGKILL)


# --- predicted ------------------------------------------------------------------------------------


def bench(folder: Path, repeats: int, seconds: float, device_s: float) -> Path:
    """Measure one worker, and return the file."""
    command = [sys.executable, "-m", "quorate", "bench", "--workers", "1", "--devices", "cpu"]
    command += ["--engine", "processes", "--costs", "--repeats", str(repeats)]
    command += ["--seconds", str(seconds), "--out", str(folder), str(HERE), "train"]
    command += ["--device-s", str(device_s)]
    subprocess.run(command, check=True)
    return folder / "results.json"


def predicted(file: Path, case: Case, *, shares_cores: bool) -> float:
    """Return examples/s, by what ``quorate plan`` does with such options."""
    from quorate.commands.plan.assumptions import Assumptions
    from quorate.commands.plan.command import OPTIONS
    from quorate.commands.plan.measurements import read_bench
    from quorate.simulation.inputs import Stragglers
    from quorate.simulation.simulate import simulate

    measured = read_bench(file)[0]
    options = {name: default for rows in OPTIONS.values() for name, _, _, default, _ in rows}
    asked = {name[2:].replace("-", "_"): default for name, default in options.items()}
    asked |= {"cores": measured.cores if shares_cores else None, "per_host": case.workers}
    if case.kills:
        # Of each worker, from its return to its next end.
        gone_s = (measured.restart_s or 0.0) + (measured.detection_s or 0.0)
        asked["mtbf_h"] = max(0.1, case.workers * KILL_EVERY_S - gone_s) / 3600
    if case.saves:
        saving = json.loads(file.read_text())["costs"]["saving"]
        asked["save_every_s"] = max(0.01, saving["every_s"] - saving["stall_s"])
    given = Assumptions(asked).about(measured, case.rule)
    if case.kills:  # and not the coordinator, whose end is that of the run
        from dataclasses import replace

        given["failures"] = replace(given["failures"], coordinator_mtbf_h=float("inf"))
    if case.is_slow:
        given["stragglers"] = Stragglers(steady=[1.0] * (case.workers - 1) + [SLOWER])
    return simulate(case.workers, update=case.rule, shards=SHARDS, **given).examples_per_s


# --- measured -------------------------------------------------------------------------------------


def measure(file: Path, case: Case, seconds: float, device_s: float, log: Path) -> float:
    """Run a case once, and return examples/s."""
    from quorate.commands.bench.contenders import Contender
    from quorate.commands.bench.runs import BenchProgram, run
    from quorate.commands.plan.measurements import read_bench

    words = ["train", "--device-s", str(device_s)]
    if case.is_slow:
        under = read_bench(file)[0].under(case.rule)
        one = json.loads(file.read_text())["contenders"][0]["runs"][0]["workers"][0]["seconds"]
        in_forward = one["forward"] / (one["forward"] + one["backward"])
        words += ["--asleep-s", f"{(SLOWER - 1) * under.shard_s:.6f}"]
        words += ["--in-forward", f"{in_forward:.4f}", "--slow", str(case.workers - 1)]
    words += ["--kills"] * case.kills
    options = {"engine": "processes", "update": case.rule}
    lasts_s = max(seconds, LEAST_KILLS * KILL_EVERY_S) if case.kills else seconds
    program = BenchProgram(str(HERE), None, tuple(words), options, lasts_s)
    more = {"save_every_s": SAVE_EVERY_S} if case.saves else {}
    return run(program, Contender("cpu", case.workers), SHARDS, log, more=more).examples_per_s


def main() -> None:
    """Predict, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", choices=["train"], help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device-s", type=float, default=0.0)
    parser.add_argument("--asleep-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--in-forward", type=float, default=0.5, help=argparse.SUPPRESS)
    parser.add_argument("--slow", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kills", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role == "train":
        train(asked.device_s, asked.asleep_s, asked.in_forward, asked.slow, kills=asked.kills)
        return
    from quorate.errors import QuorateError

    cases = [case for case in CASES if asked.only in case.name]
    if not cases:
        raise SystemExit(f"--only {asked.only}: no case has that in its name")
    with tempfile.TemporaryDirectory(prefix="own-runs-") as name:
        folder = Path(name)
        seconds, device_s, log = asked.seconds, asked.device_s, folder / "failed.log"
        file = asked.bench or bench(folder / "bench", max(3, asked.rounds), seconds, device_s)
        told = {case: predicted(file, case, shares_cores=not device_s) for case in cases}
        found: dict[Case, list[float]] = {case: [] for case in cases}
        for number in range(asked.rounds):
            for case in cases if number % 2 == 0 else cases[::-1]:
                try:
                    found[case].append(measure(file, case, seconds, device_s, log))
                except QuorateError as error:  # the other cases are worth having
                    print(f"round {number + 1}: {case.name}: {error}", flush=True)
                    continue
                print(f"round {number + 1}: {case.name}: {found[case][-1]:,.0f}", flush=True)
        record = {"bench": json.loads(file.read_text()), "cases": []}
    print(f"\n{platform.machine()}, {os.cpu_count()} cores; medians of {asked.rounds} runs\n")
    print("| run | predicted examples/s | measured | error | spread |\n|---|---|---|---|---|")
    within = 0
    for case in cases:
        if not found[case]:
            print(f"| {case.name} | {told[case]:,.0f} | failed | | |")
            continue
        middle = statistics.median(found[case])
        error = told[case] / middle - 1
        spread = (max(found[case]) - min(found[case])) / middle
        within += abs(error) <= BOUND
        print(f"| {case.name} | {told[case]:,.0f} | {middle:,.0f} | {error:+.1%} | {spread:.0%} |")
        row = {"name": case.name, "predicted": told[case], "measured": found[case]}
        record["cases"].append(row | {"error": error})
    print(f"\nwithin {BOUND:.0%}: {within} of {len(cases)}")
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
