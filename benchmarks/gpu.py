"""Speed, memory and bits on a rented NVIDIA GPU, within half an hour. docs/gpu.md explains it.

    python benchmarks/gpu.py --json gpu.json       # two visible GPUs: DistributedDataParallel too
    python benchmarks/gpu.py --devices cuda:1 --networks gpt --measurements speed,digests
    python benchmarks/gpu.py --devices cpu --quick # a trial of this script, without a GPU

The table goes to standard output, a row as soon as it is measured; what did not fit into the time
is listed below it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from on_gpu import measurements, table
from on_gpu.budget import Budget
from on_gpu.job import Job
from on_gpu.process import Failed, Process

LIMIT_S = 120.0  # to name the machine


def do_job(text: str) -> None:
    """Be a process of a measurement."""
    sys.path.append(str(Path(__file__).parent / "peers"))
    from on_gpu.roles import ROLES

    job = Job(**json.loads(text))
    found = ROLES[job.role](job)
    if found is not None:
        print(json.dumps(found), flush=True)


def visible() -> str:
    """Return the names of at most two visible GPUs."""
    import torch

    return ",".join(f"cuda:{number}" for number in range(min(2, torch.cuda.device_count())))


def some_of(names: tuple[str, ...]) -> Any:
    """Return a parser of some of these names, with commas."""

    def parsed(text: str) -> tuple[str, ...]:
        wanted = tuple(text.split(","))
        if wrong := [name for name in wanted if name not in names]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(names)}")
        return wanted

    return parsed


def arguments() -> argparse.Namespace:
    """Return the arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", help="one or two, with a comma; default: the first two visible GPUs")
    add("--minutes", type=float, default=30.0, help="for all (30)")
    add("--precision", choices=("bf16", "fp32"), default="bf16")
    for name in ("networks", "hows", "measurements"):
        names = (
            measurements.NAMES if name == "measurements" else getattr(measurements, name.upper())
        )
        add(f"--{name}", type=some_of(names), default=names, help=", ".join(names))
    add("--quick", action="store_true", help="tiny networks and few steps, to try this script")
    add("--json", type=Path, metavar="FILE")
    add("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job is None and not (given.devices or visible()):
        parser.error("torch sees no GPU (see quorate doctor); --devices cpu --quick is a trial")
    return given


def main() -> None:
    """Measure what fits into the time; print the table and write the JSON."""
    given = arguments()
    if given.job is not None:
        do_job(given.job)
        return
    devices = (given.devices or visible()).split(",")
    chosen = [
        each
        for each in measurements.plan(devices, given.precision, is_quick=given.quick)
        if each.network in given.networks
        and each.how in given.hows
        and each.name in given.measurements
    ]
    budget = Budget(given.minutes, [each.weight for each in chosen])
    with Process(Job("machine", devices), time.monotonic() + LIMIT_S) as process:
        machine = process.answer()
    if isinstance(machine, Failed):
        raise SystemExit(f"{given.devices}: {machine.why}")
    command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
    is_trial = given.quick or not all(name.startswith("cuda") for name in devices)
    if is_trial:
        print("A trial of the script: nothing here is about a GPU.\n")
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    print(f"{date.today()}, `{command}`, {given.precision}: {facts}\n\n{table.HEAD}", flush=True)
    found, left_out = [], []
    for each in chosen:
        if (share_s := budget.next_share()) is None:
            left_out.append(str(each))
            continue
        results = measurements.measure(each, share_s, is_quick=given.quick)
        for row in table.rows(each, results):
            print(row, flush=True)
        found += [
            {"measurement": each.name, "network": each.network, "how": each.how}
            | {"contender": words}
            | ({"failed": result.why} if isinstance(result, Failed) else result)
            for words, result in results.items()
        ]
    print(f"\n{table.left_out(left_out)}")
    if given.json:
        whole = {"command": command, "date": str(date.today()), "is_trial": is_trial}
        whole |= {"precision": given.precision, "machine": machine}
        whole |= {"results": found, "left_out": left_out}
        given.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
