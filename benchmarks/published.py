"""Published figures beside what `quorate.simulate` says, those that do not agree too.

    python benchmarks/published.py

Sources:

OSDI 2016: Abadi et al., TensorFlow: a system for large-scale machine learning, section 6.3. 50
workers and 0 to 5 backup workers: 4 are the fastest, 1.93 s a step; 3 have the highest speed-up per
worker, 9.5%; with 5 it is slower again.
Llama 3: Dubey et al., arXiv:2407.21783, section 3.3.4. 419 unexpected interruptions in 54 days on
16,384 GPUs; more than 90% effective training time.
Meta 2024: Kokolis et al., arXiv:2410.21680. 6.50 failures per 1,000 node-days, of 8 GPUs each; mean
time to failure 7.9 h measured at 1,024 GPUs, 1.8 h projected for 16,384.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import quorate
from quorate.coordination.rules import parse
from quorate.simulation.checkpoint_interval import best_s, goodput
from quorate.simulation.inputs import Checkpoints, Failures, Network
from quorate.simulation.models import lognormal
from quorate.simulation.prediction import Prediction
from quorate.simulation.virtual_run import VirtualRun

NEEDED = 50  # gradients of an update, OSDI 2016
NODE_MTBF_H = 1000 * 24 / 6.50


class Row(NamedTuple):
    """A figure, predicted and published."""

    what: str
    predicted: float
    published: float
    note: str

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was published."""
        return self.predicted / self.published - 1


def backup_step_s(spares: int, chance: float, factor: float, spread: float, steps: int) -> float:
    """Return the mean step time of 50 workers and some backup workers; a shard takes 1 s.

    A shard is held up with some chance, and then takes so many times as long.
    """
    draw = [random.Random(f"osdi/{worker}") for worker in range(NEEDED + spares)]

    def shard_s(worker: int, *_: int) -> float:
        held_up = draw[worker].random() < chance
        return lognormal(draw[worker], spread) * (factor if held_up else 1.0)

    run = VirtualRun(
        places=[""] * (NEEDED + spares),
        shards=NEEDED + spares,
        batches=steps,
        rule=parse(f"quorum:{NEEDED}"),
        shard_s=shard_s,
        leaves_off_s=lambda _: 0.0,
        patience=1e9,  # TensorFlow's backup workers made no copies
    )
    run.play()
    return run.now / steps


def backup_workers(
    chance: float, factor: float, spread: float, steps: int = 1000
) -> tuple[list[float], list[float]]:
    """Return step times with 0 to 5 spares, at 4 the published one, and speed-ups per worker."""
    step_s = [backup_step_s(spares, chance, factor, spread, steps) for spares in range(6)]
    returns = [
        step_s[0] / own_s * NEEDED / (NEEDED + spares) - 1 for spares, own_s in enumerate(step_s)
    ]
    return [own_s / step_s[4] * 1.93 for own_s in step_s], returns


def of_nodes(nodes: int) -> Prediction:
    """Return the prediction of a run that every failure of a node ends."""
    return quorate.simulate(
        nodes,
        per_host=1,
        network=Network(engine="collective"),
        failures=Failures(
            host_mtbf_h=NODE_MTBF_H, coordinator_mtbf_h=float("inf"), run_restart_s=600.0
        ),
        checkpoints=Checkpoints(stall_s=10.0),
        steps=2,
    )


def rows() -> Iterator[Row]:
    """Yield all figures."""
    yield Row("1,024 GPUs, hours to a failure", of_nodes(128).run_mtbf_h, 7.9, "Meta 2024")
    large = of_nodes(2048)
    yield Row("16,384 GPUs, hours to a failure", large.run_mtbf_h, 1.8, "Meta 2024, a projection")
    llama_h = 54 * 24 / 419
    yield Row("16,384 GPUs, hours to a failure", large.run_mtbf_h, llama_h, "Llama 3")
    for name, how in (
        ("held up", (0.025, 1.3, 0.05)),
        ("lognormal", (0.0, 1.0, 0.19)),
    ):
        step_s, returns = backup_workers(*how)
        most = max(range(6), key=lambda spares: returns[spares])
        fitted = f"OSDI 2016, {name}"
        yield Row("50 workers, 3 spares, return %", 100 * returns[3], 9.5, f"{fitted}; fitted")
        yield Row("50 workers, spares of the best return", most, 3, fitted)
        yield Row("50 workers, 5 spares over 4", step_s[5] / step_s[4], 1.0, f"{fitted}; above 1")


def restart_for(share: float, mtbf_h: float, stall_s: float) -> float:
    """Return how many seconds a restart may take for a goodput, at the best interval."""
    low, high = 0.0, 1e5
    every_s = best_s(stall_s, mtbf_h * 3600)
    for _ in range(60):
        middle = (low + high) / 2
        enough = goodput(every_s, stall_s, mtbf_h * 3600, middle) > share
        low, high = (middle, high) if enough else (low, middle)
    return low


def main() -> None:
    """Print the table."""
    print("| figure | predicted | published | error | source |")
    print("|---|---|---|---|---|")
    for row in rows():
        print(
            f"| {row.what} | {row.predicted:,.3g} | {row.published:,.3g} | {row.error:+.0%} "
            f"| {row.note} |"
        )
    for stall_s in (1.0, 10.0, 30.0):
        allowed_s = restart_for(0.9, 54 * 24 / 419, stall_s)
        print(f"Llama 3, 90%: a checkpoint of {stall_s:g} s leaves {allowed_s / 60:.1f} min")


if __name__ == "__main__":
    main()
