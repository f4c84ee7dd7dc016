"""What failures and checkpoints leave of a run's time, played: it judges the closed form."""

from __future__ import annotations

from random import Random


def played_goodput(
    every_s: float,
    stall_s: float,
    mtbf_s: float,
    restart_s: float,
    failures: int,
    seed: int = 0,
) -> float:
    """Return the share of time with work in a run whose failures are drawn one after the other.

    Whatever its interval, a run with one seed has its failures at the same moments.

    Args:
        every_s: work between two checkpoints.
        stall_s: for how long a checkpoint holds the run up.
        mtbf_s: the mean time between failures, which is exponential.
        restart_s: how long a run takes to begin again.
        failures: so many are drawn.
        seed: of the draws.
    """
    chance = Random(seed)
    cycle_s, now, worked_s, begins_at = every_s + stall_s, 0.0, 0.0, 0.0
    for _ in range(failures):
        now += chance.expovariate(1 / mtbf_s)
        if now > begins_at:
            worked_s += (now - begins_at) // cycle_s * every_s
        begins_at = now + restart_s  # one that fails while it begins again, begins again
    return worked_s / now
