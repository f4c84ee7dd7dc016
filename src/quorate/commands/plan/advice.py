"""Advice: the bottleneck of a run of some size, in words, and remedies."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.coordination.rules import parse
from quorate.services.display.shard_time import duration
from quorate.simulation.inputs import Network, ShardTimes, Stragglers
from quorate.simulation.prediction import Prediction

LEAST = 0.1  # share of the time: a smaller part is no bottleneck


def bound(
    told: Prediction, times: ShardTimes, stragglers: Stragglers, network: Network
) -> tuple[str, str]:
    """Return the bottleneck of a run, and a remedy.

    The bottleneck is the largest part other than arithmetic, if at least ``LEAST`` of the time.
    """
    part = max((of for of in told.shares if of != "arithmetic"), key=lambda of: told.shares[of])
    takes = told.shares[part]
    if takes < LEAST:
        arithmetic = told.shares["arithmetic"]
        return f"arithmetic: it takes {arithmetic:.0%} of the time", "more workers bring more"
    rule = parse(told.update)
    everybody = told.workers + told.spares
    may_serve = network.engine == "ray" and not network.servers
    words = {
        "cores": f"cores: {takes:.0%} of the time workers wait for one, or share memory",
        "uneven": f"{told.shards} shards on {everybody} workers: {takes:.0%} of the time some "
        "have nothing to do",
        "stragglers": f"stragglers: {takes:.0%} of the time workers wait for others",
        "updates": f"updates: {takes:.0%} of the time workers wait for the optimizer's step",
        "network": f"network: {takes:.0%} of the time goes into messages, gradients, parameters",
        "checkpoints": f"checkpoints: {takes:.0%} of the time the loop stands still for them",
        "failures": f"failures: {takes:.0%} of the time is lost to them",
    }
    helps = {
        "cores": "no more workers than cores, or more hosts: more workers on these bring nothing",
        "uneven": "shards that workers divide",
        "updates": "larger shards, or a faster optimizer (fused, on a GPU)",
        "network": "larger shards"
        + ("" if network.engine == "collective" else ", --engine collective under sync")
        + (", --servers" if may_serve else ""),
        "checkpoints": "a checkpoint that holds the loop up for less",
        "failures": "a faster restart, and a faster detection"
        + (
            "; --engine ray, whose run goes on when a worker fails"
            if network.engine == "collective"
            else "; spares: without one the rest does the work of who is away"
            if not told.spares
            else ""
        ),
    }
    if part != "stragglers":
        return words[part], helps[part]
    if rule.by_shard and rule.staleness + 1 < everybody:
        what = f"the bound: of {everybody} workers {rule.staleness + 1:.0f} compute at a time"
        return f"{what}; {takes:.0%} of the time is waiting", f"bounded:{everybody - 1}, or async"
    return words[part], _against(told, times, stragglers)


def _against(told: Prediction, times: ShardTimes, stragglers: Stragglers) -> str:
    """Return a remedy against stragglers, depending on their kind."""
    steady = (
        (stragglers.slow_workers and stragglers.slow_factor > 1)
        or (stragglers.slow_hosts and stragglers.slow_host_factor > 1)
    )  # fmt: skip
    if times.work_spread > max(times.spread, stragglers.probability):
        return (
            "shards of equal work: a long one is long on any worker, so spares do not help; sort "
            "rows by length"
        )
    if steady:
        return (
            "find the slow ones, which are always the same: a spare stands in for one at most; "
            f"with --shards {4 * told.workers} the fast ones do more"
        )
    if told.update.startswith("quorum"):
        return "more --spares, as long as $ per million examples fall"
    if parse(told.update).by_shard:
        return "async, or a larger bound: then nobody waits for the oldest gradient"
    return f"--shards {4 * told.workers}: waits average out; --update quorum with --spares"


def best_spares(rows: Sequence[Prediction]) -> Prediction:
    """Return the prediction whose number of spares gives most examples/s per paid worker."""
    return max(rows, key=lambda told: told.examples_per_s / (told.workers + told.spares))


def saving(told: Prediction) -> str:
    """Return how often to save, in words."""
    if told.run_mtbf_h == float("inf"):
        return "nothing fails that loses work: save as often as you want to"
    if not told.young_s:
        return "a checkpoint costs nothing: save as often as you can"
    return (
        f"save every {span(told.save_every_s)} (Young {span(told.young_s)}, Daly "
        f"{span(told.daly_s)}): something ends the run every {span(3600 * told.run_mtbf_h)}"
    )


def span(seconds: float) -> str:
    """Return a time span for people, of seconds up to days."""
    if seconds < 120:
        return duration(seconds)
    if seconds < 7200:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 360_000 else f"{seconds / 86_400:,.0f} d"
