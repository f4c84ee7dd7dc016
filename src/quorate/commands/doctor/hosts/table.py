"""The output of a doctor for several hosts: a row per fact."""

from __future__ import annotations

from collections.abc import Iterator

from quorate.commands.doctor.hosts.facts import Crossing, Hosts, Report
from quorate.commands.doctor.table import Row


def rows(hosts: Hosts) -> Iterator[Row]:
    """Yield the rows, in the order of display."""
    ranks = sum(report.ranks for report in hosts.reports)
    met = f"{len(hosts.reports)} hosts with {ranks} ranks met at {hosts.store}"
    yield Row("hosts", f"{met} (torchrun's store, on all interfaces)")
    for report in hosts.reports:
        yield Row("hosts", _host(report))
    for way in hosts.crossings:
        yield Row("ways", _way(hosts, way))
    for way in hosts.crossings:
        if way.one == 0 and way.ahead_ms is not None:
            name, first = hosts.reports[way.other].name, hosts.reports[0].name
            side = "ahead of" if way.ahead_ms > 0 else "behind"
            error = f"+- {(way.ms or 0.0) / 2:.2f}"
            yield Row("clocks", f"{name}: {abs(way.ahead_ms):,.2f} ms {side} {first} ({error})")
    if hosts.run_dir is not None:
        without = [report.name for report in hosts.reports if report.sees_run_dir is not None]
        seen = "on all hosts" if not without else f"not on {', '.join(without)}"
        yield Row("run directory", f"{hosts.run_dir}: the same {seen}")


def _host(report: Report) -> str:
    speed = "" if report.mbit_per_s is None else f", {report.mbit_per_s:,} Mbit/s"
    parts = [f"{report.name}: {report.address} ({report.interface or 'no interface'}{speed})"]
    parts.append(f"{report.ranks} rank{'s' if report.ranks > 1 else ''}")
    parts.append(f"torch {report.torch}" if report.torch else "no torch")
    parts.append(f"Python {report.python}")
    parts.append(report.kernels)
    parts += report.gpus
    if report.driver is not None:
        parts.append(f"driver {report.driver}")
    return ", ".join(parts)


def _way(hosts: Hosts, way: Crossing) -> str:
    names = f"{hosts.reports[way.one].name} - {hosts.reports[way.other].name}"
    if way.failure is not None:
        return f"{names}: no connection: {way.failure}"
    there, back = way.mbit_per_s or 0.0, way.back_mbit_per_s or 0.0
    return f"{names}: {way.ms:.2f} ms there and back, {there:,.0f} and {back:,.0f} Mbit/s"
