"""Assumptions: what the options of a plan say that no bench knows, as inputs of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quorate.commands.plan.measurements import Measurement, read_shard_times
from quorate.errors import SettingError
from quorate.simulation import inputs

SPREAD = 0.05  # that is assumed of shard times: a bench has their means alone
MIB, GBIT = 2**20, 1e9 / 8


class Assumptions:
    """What was asked for, checked.

    Args:
        asked: the options of ``quorate plan``, by name.

    Raises:
        SettingError: an option cannot work.
        DataError: a file of shard times is not what it should be.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        for check, names in (
            (inputs.positive, ("mtbf_h", "host_mtbf_h", "gbit_s", "save_every_s")),
            (inputs.not_negative, ("detection_s", "restart_s", "run_restart_s", "save_s", "price")),
            (inputs.not_negative, ("spread", "work_spread", "gradient_mib", "latency_ms")),
        ):
            for name in names:
                if asked[name] is not None:
                    check(name, asked[name])
        self._asked = asked
        trace = asked["trace"]
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
        self.failures = inputs.Failures(
            worker_mtbf_h=asked["mtbf_h"],
            host_mtbf_h=asked["host_mtbf_h"],
            detection_s=asked["detection_s"],
            restart_s=asked["restart_s"],
            run_restart_s=asked["run_restart_s"],
        )
        self.checkpoints = inputs.Checkpoints(
            stall_s=asked["save_s"], every_s=asked["save_every_s"]
        )

    def about(self, measured: Measurement) -> dict[str, Any]:
        """Return the arguments of ``simulate`` that a measurement and these give together.

        All but those that say what is compared, what fails and what is saved.
        """
        asked = self._asked
        latency_ms = asked["latency_ms"]
        return {
            "shard_times": inputs.ShardTimes(
                mean_s=measured.shard_s,
                spread=self.spread,
                work_spread=asked["work_spread"],
                measured_s=self._drawn,
            ),
            "rows_per_shard": measured.rows_per_shard,
            "per_host": asked["per_host"],
            "update_s": measured.update_s,
            "stragglers": self.stragglers,
            "network": inputs.Network(
                engine=asked["engine"] or measured.engine.replace("towers", "processes"),
                gradient_bytes=asked["gradient_mib"] * MIB,
                bandwidth_bytes_per_s=asked["gbit_s"] * GBIT,
                latency_s=measured.latency_s if latency_ms is None else latency_ms / 1e3,
                vector_s=measured.vector_s,
            ),
            "steps": asked["steps"],
            "seed": asked["seed"],
        }

    def words(self) -> str:
        """Return what no bench says, and how to say it."""
        asked, drawn, never = self._asked, self._asked["trace"], float("inf")
        words = [
            f"shard times of {drawn}"
            if drawn
            else f"a spread of {self.spread:.0%} (--spread, --trace)",
            "no failures (--mtbf-h)"
            if asked["mtbf_h"] == asked["host_mtbf_h"] == never
            else f"{asked['restart_s']:g} s until a worker is back, {asked['run_restart_s']:g} s "
            "until the run is",
            f"{asked['save_s']:g} s a checkpoint",
        ]
        if not asked["gradient_mib"] or asked["gbit_s"] == never:
            words.append("links that cost nothing (--gradient-mib, --gbit-s)")
        return ", ".join(words)


def _share_and_factor(name: str, text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 1.0
    first, _, second = text.partition(":")
    try:
        part, factor = float(first), float(second)
    except ValueError:
        part = factor = -1.0
    if not (0 <= part <= 1 <= factor):
        expected = "a share and how many times as long, such as 0.01:4"
        raise SettingError(name, text, expected, "from 0 to 1, and at least 1")
    return part, factor
