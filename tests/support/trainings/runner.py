"""Runs of a configuration: the outcome of a run, and the differences between two outcomes."""

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.runs import Ended
from support.trainings.configuration import RUN_OPTIONS, Configuration
from support.trainings.engines import ENGINES
from support.trainings.trees import CURRENT, Runs

SCRIPT = CURRENT / "tests" / "scripts" / "configured.py"
# Checkpoints by the number of updates and never by the clock; no summaries, to save time.
SAVING = ("--save-every-s", "1e9", "--save-every-steps", "2", "--summary-every-s", "1e9")
FACTS = ("digest", "averaged_digest", "global_step", "epoch", "shards", "same_bits")
# Times, and numbers of shards by worker: both depend on the machine's load.
UNREPEATABLE = {"at", "begun_at", "spent", "examples_per_s", "fresh", "stale", "dropped", "slow"}
MOST_SHOWN = 4  # of the differences between two sets of metrics


class Outcome(NamedTuple):
    """Exit codes, digests and metrics of a run."""

    codes: Sequence[int | None]  # exit codes of the parts, see ``trees.Ended``
    facts: Mapping[str, Any]  # ``FACTS`` of the newest checkpoint, if any
    metrics: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl without ``UNREPEATABLE``
    said: str  # the last line of output of the last part
    parts: Sequence[Ended] = ()
    happened: Collection[str] = ()  # marks of faults
    log: Sequence[Mapping[str, Any]] = ()  # all of metrics.jsonl


def run_configuration(tree: Runs, configuration: Configuration) -> Outcome:
    """Run all parts of a configuration with the code of a tree."""
    codes: list[int | None] = []
    said = ""
    printed: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="quorate-") as folder:
        run_dir = Path(folder) / "run"
        for part, engine in enumerate(configuration.engines):
            options = [*ENGINES[engine], *SAVING, "--run-dir", str(run_dir)]
            for option in configuration.options:
                options += RUN_OPTIONS.get(option, ())
            if configuration.rule != "sync":
                options += ["--update", configuration.rule]
            if configuration.timeout:
                options += ["--worker-timeout-s", str(configuration.timeout)]
            ended = tree.run(["run", *options, str(SCRIPT), str(configuration), str(part), folder])
            codes.append(ended.code)
            printed.append(ended)
            said = ((ended.err.strip() or ended.out.strip()).splitlines() or [""])[-1]
            if ended.left:
                said = f"processes were left: {'; '.join(ended.left)}"
                codes.append(None)
            if ended.code in (2, None):
                break
        facts = {}
        happened = {file.stem for file in Path(folder).glob("done-*")}
        if list(run_dir.glob("checkpoints/*")):
            inspected = tree.run(["inspect", "--json", str(run_dir)])
            if inspected.code == 0:
                facts = {n: v for n, v in json.loads(inspected.out).items() if n in FACTS}
        log = _log(run_dir / "metrics.jsonl")
        return Outcome(codes, facts, _metrics(log), said, printed, happened, log)


def _log(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut the last


def _metrics(log: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    for line in log:
        if "doubts" in line:
            line["doubts"] = bool(line["doubts"])  # messages, whose wording may differ
    return [{n: v for n, v in line.items() if n not in UNREPEATABLE} for line in log]


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """Return a line for each difference between two outcomes; messages may differ."""
    lines = []
    if expected.codes != found.codes:
        lines.append(f"exit codes: {expected.codes} before, {found.codes} now: {found.said}")
    for name in FACTS:
        before, now = expected.facts.get(name), found.facts.get(name)
        if before != now:
            lines.append(f"{name}: {before} before, {now} now")
    if len(expected.metrics) != len(found.metrics):
        lines.append(f"metrics: {len(expected.metrics)} lines before, {len(found.metrics)} now")
    pairs = zip(expected.metrics, found.metrics, strict=False)
    of_metrics = [
        f"metrics, line {number}, {name}: {before.get(name)} before, {now.get(name)} now"
        for number, (before, now) in enumerate(pairs, 1)
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    lines += of_metrics[:MOST_SHOWN]
    if len(of_metrics) > MOST_SHOWN:
        lines.append(f"metrics: {len(of_metrics) - MOST_SHOWN} more values differ")
    return lines
