"""How often to save: what failures and checkpoints leave of a run's time, in closed form.

Failures come at exponential times of mean M. Each loses what was done since the last checkpoint and
R seconds more; each checkpoint holds the run up for C seconds; tau seconds of work lie between two.
Failures may come while a checkpoint is written and while the run begins again. Then work is done
for this share of the time (Daly, Future Generation Computer Systems 22, 2006, equation 20):

    goodput(tau) = tau / (M exp(R/M) (exp((tau + C)/M) - 1))

``best_s`` is the tau of its maximum. Young's rule (Communications of the ACM 17, 1974), sqrt(2CM),
and Daly's (2006, equation 37) are approximations of it.
"""

from __future__ import annotations

from math import exp, expm1, inf, isinf, log, sqrt


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval between two checkpoints, in seconds."""
    return sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, his estimate of higher order, in seconds."""
    if isinf(mtbf_s):
        return inf
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    part = stall_s / (2 * mtbf_s)
    return sqrt(2 * stall_s * mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - stall_s


def best_s(stall_s: float, mtbf_s: float) -> float:
    """Return the interval of the most goodput, in seconds; 0: without cost, as often as can be.

    Where the derivative is 0: (1 - tau/M) exp((tau + C)/M) = 1, found by bisection.
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
    """Return the share of the time in which work is done that stays.

    Args:
        every_s: tau; infinite only if nothing fails.
        stall_s: C.
        mtbf_s: M, of whatever ends the run.
        restart_s: R.
    """
    if isinf(mtbf_s):
        return 1.0 if isinf(every_s) else every_s / (every_s + stall_s)
    if every_s <= 0:  # the limit: only without cost does anything remain
        return exp(-restart_s / mtbf_s) if stall_s == 0 else 0.0
    if (every_s + stall_s + restart_s) / mtbf_s > 700:
        return 0.0  # less than a double can say
    return every_s / (mtbf_s * exp(restart_s / mtbf_s) * expm1((every_s + stall_s) / mtbf_s))
