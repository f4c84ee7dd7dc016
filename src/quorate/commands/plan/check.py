"""The check of a plan: the prediction of an actual run, beside the figures in the run's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from quorate.commands.plan.assumptions import Assumptions
from quorate.commands.plan.measurements import WORK, Measurement, read_bench
from quorate.commands.plan.trace import TracedUpdate, read_trace
from quorate.coordination.rules import parse
from quorate.errors import CheckpointError, DataError
from quorate.machine.regular_file import exists
from quorate.machine.text import aligned, three_digits
from quorate.services.checkpoints import files
from quorate.services.display.shard_time import duration
from quorate.simulation.inputs import Failures, Stragglers
from quorate.simulation.prediction import Prediction
from quorate.simulation.simulate import WARM_UP, simulate

PROFILE = "profile.json"  # in the run directory, if given as ``quorate run --profile``
SAVE_EVERY_S = 600.0  # the default of RunDir(save_every_s=)
OFF = 0.05  # share of a shard's time: a larger error is named as the cause of the rest


class RunFigure(NamedTuple):
    """A figure of a run."""

    name: str
    predicted: float | None  # None: too little is known
    measured: float | None
    unit: str  # "/s" a rate, "s" seconds, "%" a share, "" a number
    why: str = ""  # why a value is unknown

    @property
    def error(self) -> float | None:
        """The error of the prediction: relative to the measured value; the difference of shares."""
        if self.predicted is None or self.measured is None:
            return None
        if self.unit == "%":
            return self.predicted - self.measured
        return self.predicted / self.measured - 1 if self.measured else None


class RunFigures(NamedTuple):
    """The figures in the lines of a run."""

    updates: int  # counted updates: no warm-up, none after an evaluation or a restart
    rows_per_s: float | None
    intervals_s: list[float]  # sorted
    dropped: float  # share of the rows
    staleness: float  # mean, of the oldest gradient of an update
    restarts: int  # of the whole run
    lost_s: float | None  # from the last update before each restart to the first after
    span_s: float | None  # from the first update to the last
    shard_s: list[float]  # mean of each worker's shards; empty: unknown
    away: float | None  # share of the time in which a worker was absent, after its start


def check(
    run_dir: Path, bench: Path | None, asked: Mapping[str, Any], assumptions: Assumptions
) -> dict[str, Any]:
    """Print the prediction and the measurement of a run, and return both for JSON.

    Args:
        run_dir: a directory with ``metrics.jsonl`` and a checkpoint.
        bench: the times of shards, updates and sums, from a bench or a profile; None: ``PROFILE``
            in the run directory, or else the shard times in ``metrics.jsonl``.
        asked: the options of ``quorate plan``.
        assumptions: the checked options.

    Raises:
        DataError: a file is not valid, with the line, or lacks needed values.
        SettingError: an option is not valid.
    """
    # 1. Read the run's settings and lines.
    lines = read_trace(run_dir / "metrics.jsonl")
    facts = _facts(run_dir)
    rule, shards = str(facts["update"]), int(facts["shards"])
    workers, total = lines[-1].workers, len(lines)
    lines = [line for line in lines if line.workers == workers]  # not of earlier processes
    seen = observed(lines, warm_up=WARM_UP * (shards if parse(rule).by_shard else 1))
    # 2. Choose the inputs of the simulation.
    source, measured, stragglers = _source(run_dir, bench, seen, facts, workers, assumptions)
    given = assumptions.about(measured, rule)
    given |= {"stragglers": stragglers, "rows_per_shard": int(facts["batch_size"]) / shards}
    if asked["cores"] is None and measured.is_on_cpu and facts["engine"] in ("towers", "processes"):
        given |= {"cores": replace(given["cores"], per_host=measured.cores), "per_host": workers}
    if asked["engine"] == "" and facts["engine"] == "collective":
        given["network"] = replace(given["network"], engine="collective")
    failures, failing = _failures(given["failures"], seen)
    every_s = asked["save_every_s"] or SAVE_EVERY_S
    given |= {"failures": failures, "checkpoints": replace(given["checkpoints"], every_s=every_s)}
    told = simulate(workers, update=rule, shards=shards, **given)
    # 3. Compare.
    figures = _figures(told, seen, measured, failures, lines)
    print(
        f"{run_dir}: {total:,} updates, {workers} worker{'s' if workers > 1 else ''}, {rule}, "
        f"{shards} shard{'s' if shards > 1 else ''}, {facts['engine']}; {seen.updates:,} counted"
    )
    print(f"from {source}\nassumed: {assumptions.words(measured)}{failing}\n\n{_table(figures)}\n")
    for line in _remarks(figures):
        print(line)
    return {
        "run_dir": str(run_dir),
        "source": source,
        "prediction": told.to_json(),
        "figures": [figure._asdict() | {"error": figure.error} for figure in figures],
    }


def observed(lines: Sequence[TracedUpdate], warm_up: int) -> RunFigures:
    """Return the figures of a run.

    Args:
        warm_up: number of uncounted updates of each process.
    """
    rows, intervals_s, lost_s, since = 0, [], 0.0, 1
    is_known = all(line.at_s is not None for line in lines)
    for before, line in pairwise(lines):
        since = 1 if line.begun_at_s is not None else since + 1
        if before.at_s is None or line.at_s is None:
            continue
        took_s = line.at_s - before.at_s
        if line.begun_at_s is not None:
            lost_s = lost_s + took_s if took_s >= 0 else float("nan")  # another host's clock
        elif since > warm_up and line.step == before.step + 1 and not line.is_after_evaluation:
            intervals_s.append(took_s)
            rows += line.rows
    restarts = sum(line.begun_at_s is not None for line in lines[1:])
    span_s = (lines[-1].at_s or 0.0) - (lines[0].at_s or 0.0) if is_known else None
    counted = lines[warm_up:] or lines
    applied, dropped = (
        sum(line.rows for line in counted),
        sum(line.dropped_rows for line in counted),
    )
    shard_s, away = _spent(lines)
    whole_s = sum(intervals_s)
    if intervals_s:
        lost_s = max(0.0, lost_s - restarts * median(intervals_s))
    return RunFigures(
        updates=len(intervals_s),
        rows_per_s=rows / whole_s if whole_s else None,
        intervals_s=sorted(intervals_s),
        dropped=dropped / (applied + dropped) if applied + dropped else 0.0,
        staleness=fmean(line.staleness for line in counted),
        restarts=restarts,
        lost_s=lost_s if is_known and lost_s == lost_s else None,
        span_s=span_s,
        shard_s=shard_s,
        away=away,
    )


def _spent(lines: Sequence[TracedUpdate]) -> tuple[list[float], float | None]:
    """Return each worker's mean shard time, and the share of the time with a worker absent.

    Measured from the first to the last note of each process, so without the start of the process.
    """
    workers = lines[-1].workers
    begun, work_s = [0.0] * workers, [0.0] * workers
    starting_s = span_s = 0.0
    first: TracedUpdate | None = None
    last: TracedUpdate | None = None
    for line in [*lines, None]:
        if line is None or line.begun_at_s is not None:
            if first is not None and last is not None and first is not last:
                assert first.spent is not None
                assert last.spent is not None
                for worker in range(min(workers, first.workers)):
                    gone = {p: last.spent[p][worker] - first.spent[p][worker] for p in last.spent}
                    begun[worker] += gone["shards"]
                    work_s[worker] += sum(gone[phase] for phase in WORK)
                    starting_s += gone["starting"]
                span_s += (last.at_s or 0.0) - (first.at_s or 0.0)
            first = last = None
        if line is not None and line.spent is not None:
            first, last = first or line, line
    if not span_s or min(begun) <= 0 or min(work_s) <= 0:
        return [], None
    shard_s = [of_s / shards for of_s, shards in zip(work_s, begun, strict=True)]
    return shard_s, starting_s / span_s / workers


def _facts(run_dir: Path) -> dict[str, Any]:
    """Return the record of the newest readable checkpoint."""
    for path, _ in files.newest_first(run_dir):
        try:
            return files.record_of(path)
        except CheckpointError:
            continue
    expected = "one that can be read: it says how many shards there were, and under which rule"
    raise DataError(run_dir, got="no checkpoint", expected=expected, fix="let the run save")


def _source(
    run_dir: Path,
    bench: Path | None,
    seen: RunFigures,
    facts: Mapping[str, Any],
    workers: int,
    assumptions: Assumptions,
) -> tuple[str, Measurement, Stragglers]:
    """Return the source of shard times in words, the measurement, and the stragglers."""
    path = bench or run_dir / PROFILE
    if bench is not None or exists(path):
        listed = read_bench(path)
        alike = [one for one in listed if one.workers == workers] or listed[-1:]
        (measured,) = alike[:1]
        many = f"{measured.workers} worker{'s' if measured.workers > 1 else ''}"
        # A bench with a different number of shards: scale the time by the rows per shard.
        scale = int(facts["batch_size"]) / int(facts["shards"]) / measured.rows_per_shard
        measured = measured._replace(shard_s=measured.shard_s * scale)
        words = f"{path}, {many}, {measured.engine}: shards of {duration(measured.shard_s)}"
        return words, measured, assumptions.stragglers
    if not seen.shard_s:
        expected = f"a bench before --check, {PROFILE}, or a run of several seconds"
        raise DataError(run_dir, got="nothing about shard times", expected=expected)
    mean_s = median(seen.shard_s)
    measured = Measurement(
        workers=workers,
        rule=str(facts["update"]),
        engine=str(facts["engine"]),
        rows_per_shard=int(facts["batch_size"]) / int(facts["shards"]),
        shard_s=mean_s,
        update_s=0.0,
        vector_s=0.0,
        latency_s=0.0,
        shards=int(facts["shards"]),
        examples_per_s=seen.rows_per_s or 1.0,
        cores=1,
        threads=int(facts["threads"]),
        is_on_cpu=False,  # shard times include any slowness of cores
        leaves_off_s=mean_s / 4,
    )
    words = (
        f"{run_dir / 'metrics.jsonl'}: shards of {duration(mean_s)}, as slow as each worker was; "
        "not known are updates, sums and messages, taken as 0: quorate plan BENCH --check, or "
        f"quorate run --profile {run_dir / PROFILE}"
    )
    return words, measured, Stragglers(steady=[s / mean_s for s in seen.shard_s])


def _failures(told: Failures, seen: RunFigures) -> tuple[Failures, str]:
    """Return the assumed failures: of the options, or else the run's own rate of restarts."""
    if not told.worker_mtbf_h == told.host_mtbf_h == inf:
        return told, ""
    if not seen.restarts or not seen.span_s:
        return told, ""
    mtbf_h = seen.span_s / seen.restarts / 3600
    words = f"; that the run begins again each {duration(3600 * mtbf_h)}, as it did (--mtbf-h)"
    return replace(told, coordinator_mtbf_h=mtbf_h), words


def _figures(
    told: Prediction,
    seen: RunFigures,
    measured: Measurement,
    failures: Failures,
    lines: Sequence[TracedUpdate],
) -> list[RunFigure]:
    """Return the figures to compare."""
    runs_again = told.run_mtbf_h != inf
    whys = {
        "at": ""
        if lines[-1].at_s is not None
        else "metrics.jsonl has no times: an older version's",
        "spent": "" if seen.shard_s else "the run was too short, or is an older version's",
        "mtbf": "say how often workers fail: --mtbf-h",
        "restarts": "put in as it was: --mtbf-h"
        if runs_again
        else "the run did not begin again, and nothing says that it may: --mtbf-h",
    }
    times = seen.intervals_s
    p99_s = times[min(len(times) - 1, int(0.99 * len(times)))] if times else None
    workers_fail = failures.worker_mtbf_h != inf
    away = None
    if workers_fail:
        gone_s = failures.restart_s + failures.detection_s
        away = gone_s / (failures.worker_mtbf_h * 3600 + gone_s)
    span_s = seen.span_s
    is_put_in = not workers_fail and failures.host_mtbf_h == inf
    again = span_s / 3600 / told.run_mtbf_h if runs_again and span_s and not is_put_in else None
    lost_s = told.shares["failures"] * span_s if runs_again and span_s else None
    mean_s = fmean(seen.shard_s) if seen.shard_s else None
    running = told.running_examples_per_s
    if workers_fail:  # workers were absent in the measured run, too
        running *= told.goodput_of_workers
    return [
        RunFigure("a shard's work", measured.shard_s, mean_s, "s", whys["spent"]),
        RunFigure("examples/s", running, seen.rows_per_s, "/s", whys["at"]),
        RunFigure("step, median", told.step_s, median(times) if times else None, "s", whys["at"]),
        RunFigure("step, p99", told.step_p99_s, p99_s, "s", whys["at"]),
        RunFigure("rows dropped", told.dropped, seen.dropped, "%"),
        RunFigure("staleness, mean", told.staleness_mean, seen.staleness, ""),
        RunFigure("workers away", away, seen.away, "%", whys["spent"] or whys["mtbf"]),
        RunFigure("restarts of the run", again, float(seen.restarts), "", whys["restarts"]),
        RunFigure("time lost to them", lost_s, seen.lost_s, "s", whys["at"] or whys["restarts"]),
    ]


def _table(figures: Sequence[RunFigure]) -> str:
    rows = [("figure", "predicted", "measured", "error", "")]
    for figure in figures:
        error = figure.error
        sign = " points" if figure.unit == "%" else "%"
        rows.append(
            (
                figure.name,
                _shown(figure.predicted, figure.unit),
                _shown(figure.measured, figure.unit),
                "" if error is None else f"{100 * error:+.1f}{sign}",
                figure.why if figure.predicted is None or figure.measured is None else "",
            )
        )
    return aligned(rows, right=[1, 2, 3])


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    if unit == "s":
        return duration(value)
    return f"{value:.1%}" if unit == "%" else three_digits(value)


def _remarks(figures: Sequence[RunFigure]) -> list[str]:
    """Return the causes of wrong predictions, as far as known."""
    shard, speed = figures[0], figures[1]
    lines = []
    if shard.error is not None and abs(shard.error) >= OFF and shard.measured:
        times = shard.measured / (shard.predicted or 1.0)
        lines.append(
            f"shards took {times:.2f} times as long as was put in: all below follows from that; "
            "plan from a bench with as many workers, on a machine that nobody else uses"
        )
    elif speed.error is not None and abs(speed.error) >= OFF:
        lines.append(
            "shards took as long as was put in: what is off are updates, sums, messages, or how "
            "shard times vary (--spread, --trace)"
        )
    return lines
