"""The best time between checkpoints, and the share of useful time, in closed form.

Failures come at exponential times of mean M. A failure loses the work since the last checkpoint,
and R seconds more. A checkpoint stops the run for C seconds. tau seconds of work lie between two
checkpoints. Failures may come during a checkpoint and during a restart. The share of useful time is
then (Daly, Future Generation Computer Systems 22, 2006, equation 20):

    goodput(tau) = tau / (M exp(R/M) (exp((tau + C)/M) - 1))

``best_s`` is the tau with the largest goodput. Young's rule (Communications of the ACM 17, 1974),
sqrt(2CM), and Daly's rule (2006, equation 37) are approximations.
"""

from __future__ import annotations

from math import exp, expm1, inf, isinf, log, sqrt


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval between two checkpoints, in seconds."""
    return sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's interval between two checkpoints, of higher order, in seconds."""
    if isinf(mtbf_s):
        return inf
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    part = stall_s / (2 * mtbf_s)
    return sqrt(2 * stall_s * mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - stall_s


def best_s(stall_s: float, mtbf_s: float) -> float:
    """Return the interval with the largest goodput, in seconds; 0 if a checkpoint costs nothing.

    The derivative is 0 at (1 - tau/M) exp((tau + C)/M) = 1; bisection finds the point.
    """
    if isinf(mtbf_s):
        return inf
    low, high = 0.0, mtbf_s
    for _ in range(100):
        middle = (low + high) / 2
        rest = 1 - middle / mtbf_s
        is_before = rest > 0 and log(rest) + (middle + stall_s) / mtbf_s > 0
        low, high = (middle, high) if is_before else (low, middle)
    return low


def goodput(every_s: float, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the share of useful time.

    Args:
        every_s: tau, time of work between checkpoints; infinite only if nothing fails.
        stall_s: C, pause for a checkpoint.
        mtbf_s: M, mean time between failures that end the run.
        restart_s: R, time of a restart.
    """
    if isinf(mtbf_s):
        return 1.0 if isinf(every_s) else every_s / (every_s + stall_s)
    if every_s <= 0:  # the limit for tau = 0
        return exp(-restart_s / mtbf_s) if stall_s == 0 else 0.0
    if (every_s + stall_s + restart_s) / mtbf_s > 700:
        return 0.0  # too small for a double
    return every_s / (mtbf_s * exp(restart_s / mtbf_s) * expm1((every_s + stall_s) / mtbf_s))
