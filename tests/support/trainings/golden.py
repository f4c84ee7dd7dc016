"""Golden digests: results of runs with the code of ``trees.BASE``, by kind of processor.

``tests/golden/configurations.txt`` lists the runs, a line of ``configuration`` each. Bits depend on
the processor and on torch: a file ``tests/golden/<kind>.json`` has the results of a single kind.
``tests/golden/changed.json`` has the runs whose bits changed on purpose since, with the reason.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from support.trainings.configuration import Configuration, parse
from support.trainings.runner import Outcome, run_configuration
from support.trainings.trees import BASE, Runs

FOLDER = Path(__file__).parents[2] / "golden"
# Instructions with an effect on the choice of kernels by torch, MKL and oneDNN.
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
)
INSTRUCTIONS = ("avx", "fma", "amx", "f16c", "sse4", "sve", "asimd", "bf16", "i8mm")

Result = Mapping[str, Any]


def configurations() -> list[Configuration]:
    """Return all golden runs."""
    lines = (FOLDER / "configurations.txt").read_text().splitlines()
    return [parse(line) for line in lines if line and not line.startswith("#")]


def processor() -> dict[str, Any]:
    """Return the kind of this processor: properties of processor and torch that decide bits."""
    info: dict[str, str] = {}
    if (file := Path("/proc/cpuinfo")).exists():
        for line in file.read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    flags = info.get("flags", info.get("Features", "")).split()
    return {
        "maker": info.get("vendor_id", info.get("CPU implementer", platform.machine())),
        "family": info.get("cpu family", info.get("CPU architecture", "")),
        "model": info.get("model", info.get("CPU part", platform.processor())),
        "instructions": sorted(flag for flag in flags if flag.startswith(INSTRUCTIONS)),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "torch": torch.__version__,
    }


def file_of(kind: Mapping[str, Any]) -> Path:
    """Return the file for the digests of a kind of processor."""
    words = [kind["maker"], kind["family"], kind["model"], kind["kernels"], "torch", kind["torch"]]
    sha256 = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()
    return FOLDER / f"{'-'.join(words)}-{sha256[:8]}.json"


def recorded(file: Path) -> dict[str, Any] | None:
    """Return results by name as recorded for a kind of processor; None: there is no file."""
    if not file.exists():
        return None
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


def changed() -> dict[str, str]:
    """Return the runs whose bits changed on purpose since, with reasons."""
    reasons: dict[str, str] = json.loads((FOLDER / "changed.json").read_text())
    return reasons


def result_of(outcome: Outcome) -> Result:
    """Return the stored part of an outcome: exit codes, digests and a hash of the metrics."""
    metrics = json.dumps(outcome.metrics, sort_keys=True)
    return {
        "codes": [*outcome.codes],
        "digest": outcome.facts.get("digest"),
        "averaged_digest": outcome.facts.get("averaged_digest"),
        "metrics_sha256": hashlib.sha256(metrics.encode()).hexdigest(),
    }


def results(tree: Runs, runs: Iterable[Configuration]) -> dict[str, Result]:
    """Run configurations with the code of a tree and return their results."""
    return {str(run): result_of(run_configuration(tree, run)) for run in runs}


def undisturbed(tree: Runs, runs: Iterable[Configuration]) -> dict[str, Result]:
    """Return the digests of the same trainings on one worker, in one part and without an event."""
    found = {str(run): result_of(run_configuration(tree, run.undisturbed)) for run in runs}
    digests = ("digest", "averaged_digest")
    return {run: {name: result[name] for name in digests} for run, result in found.items()}


def unequal(expected: Mapping[str, Result], found: Mapping[str, Result]) -> Sequence[str]:
    """Return a line for each unexpected value, with the command that repeats the difference."""
    return [
        f"{run}: {name} was {before} with {BASE[:7]}, is {result[name]}; compare with "
        f'python tests/compare_with_base.py --base {BASE[:7]} --only "{run}"'
        for run, result in found.items()
        for name, before in expected[run].items()
        if before != result[name]
    ]
