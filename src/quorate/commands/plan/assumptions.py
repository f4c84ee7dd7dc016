"""Assumptions: options of a plan beyond the measurements of a bench, as inputs of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quorate.commands.plan.measurements import Measurement, read_shard_times
from quorate.errors import SettingError
from quorate.settings import at_least
from quorate.simulation import inputs

SPREAD = 0.05  # assumed spread of shard times: a bench has only means
DETECTION_S, RESTART_S, SAVE_S = 1.0, 30.0, 1.0  # if neither an option nor the bench has a value
MIB, GBIT = 2**20, 1e9 / 8


class Assumptions:
    """The checked options of a plan.

    Args:
        asked: the options of ``quorate plan``, by name.

    Raises:
        SettingError: an option is not valid.
        DataError: a file of shard times is not valid.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        for check, names in (
            (
                inputs.unbounded,
                ("mtbf_h", "host_mtbf_h", "gbit_s", "ray_gbit_s", "bisection_gbit_s"),
            ),
            (inputs.positive, ("save_every_s",)),
            (inputs.not_negative, ("detection_s", "restart_s", "run_restart_s", "save_s", "price")),
            (inputs.not_negative, ("gradient_mib", "latency_ms")),
            (inputs.deviation, ("spread", "work_spread")),
            (at_least(1), ("cores",)),
        ):
            for name in names:
                if asked[name] is not None:
                    check(name, asked[name])
        self._asked = asked
        trace = asked["trace"]
        if trace is not None and asked["spread"] is not None:
            expected = "none beside --trace, whose times are drawn as they are"
            raise SettingError("spread", asked["spread"], expected, "leave one of both out")
        self._drawn = () if trace is None else read_shard_times(Path(trace))
        self.spread = SPREAD if asked["spread"] is None else float(asked["spread"])
        held_up, slow, slow_hosts = (
            _share_and_factor(name, asked[name])
            for name in ("held_up", "slow_workers", "slow_hosts")
        )
        self.stragglers = inputs.Stragglers(
            probability=held_up[0],
            factor=held_up[1],
            slow_workers=slow[0],
            slow_factor=slow[1],
            slow_hosts=slow_hosts[0],
            slow_host_factor=slow_hosts[1],
        )

    def failures(self, measured: Measurement) -> inputs.Failures:
        """Return the assumed failures."""
        asked = self._asked
        return inputs.Failures(
            worker_mtbf_h=asked["mtbf_h"],
            host_mtbf_h=asked["host_mtbf_h"],
            detection_s=_first(asked["detection_s"], measured.detection_s, DETECTION_S),
            restart_s=_first(asked["restart_s"], measured.restart_s, RESTART_S),
            run_restart_s=asked["run_restart_s"],
        )

    def checkpoints(self, measured: Measurement) -> inputs.Checkpoints:
        """Return the assumed checkpoints."""
        stall_s = _first(self._asked["save_s"], measured.save_s, SAVE_S)
        return inputs.Checkpoints(stall_s=stall_s, every_s=self._asked["save_every_s"])

    def about(self, of_bench: Measurement, rule: str) -> dict[str, Any]:
        """Return the arguments of ``simulate`` under a rule, from a measurement and the options.

        The arguments that vary in the comparison are missing.
        """
        asked, measured = self._asked, of_bench.under(rule)
        latency_ms = asked["latency_ms"]
        return {
            "failures": self.failures(of_bench),
            "checkpoints": self.checkpoints(of_bench),
            "cores": inputs.Cores(
                per_host=asked["cores"],
                threads=measured.threads,
                crowding=of_bench.crowding or 1.0,
            ),
            "shard_times": inputs.ShardTimes(
                mean_s=measured.shard_s,
                spread=self.spread,
                work_spread=asked["work_spread"],
                measured_s=self._drawn,
                leaves_off_s=measured.leaves_off_s,
            ),
            "rows_per_shard": measured.rows_per_shard,
            "per_host": asked["per_host"],
            "update_s": measured.update_s,
            "stragglers": self.stragglers,
            "network": inputs.Network(
                engine=asked["engine"] or measured.engine.replace("towers", "processes"),
                gradient_bytes=asked["gradient_mib"] * MIB,
                bandwidth_bytes_per_s=asked["gbit_s"] * GBIT,
                ray_bytes_per_s=asked["ray_gbit_s"] * GBIT,
                bisection_bytes_per_s=asked["bisection_gbit_s"] * GBIT,
                servers=asked["servers"],
                latency_s=measured.latency_s if latency_ms is None else latency_ms / 1e3,
                vector_s=measured.vector_s,
            ),
            "steps": asked["steps"],
            "seed": asked["seed"],
        }

    def words(self, measured: Measurement) -> str:
        """Return the assumptions beside speeds in words, with the options that set them."""
        asked, drawn, never = self._asked, self._asked["trace"], float("inf")
        failures, stall_s = self.failures(measured), self.checkpoints(measured).stall_s
        words = [
            f"shard times of {drawn}"
            if drawn
            else f"a spread of {self.spread:.0%} (--spread, --trace)",
            "no failures (--mtbf-h)"
            if asked["mtbf_h"] == asked["host_mtbf_h"] == never
            else f"{failures.restart_s:.3g} s until a worker is back, {failures.run_restart_s:g} s "
            "until the run is",
            f"{stall_s:.2g} s a checkpoint",
        ]
        if measured.is_on_cpu and asked["cores"] is None:
            words.append("a core for each thread (--cores)")
        is_ray = (asked["engine"] or measured.engine) == "ray"
        if asked["gradient_mib"] and is_ray:
            words.append(f"{asked['ray_gbit_s']:g} Gbit/s by Ray itself (--ray-gbit-s)")
        elif not asked["gradient_mib"] or asked["gbit_s"] == never:
            words.append("links that cost nothing (--gradient-mib, --gbit-s)")
        return ", ".join(words)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _share_and_factor(name: str, text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 1.0
    first, _, second = text.partition(":")
    try:
        part, factor = float(first), float(second)
    except ValueError:
        part = factor = -1.0
    if not (0 <= part <= 1 <= factor <= inputs.MOST):
        expected = "a share and how many times as long, such as 0.01:4"
        raise SettingError(name, text, expected, "from 0 to 1, and at least 1")
    return part, factor
