"""Verdicts on several hosts: the expected problems between hosts, and remedies. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from quorate.commands.doctor.hosts.facts import Crossing, Hosts, Report
from quorate.commands.doctor.verdict import BEWARE, FAILS, Verdict

SLOW_MBIT_PER_S = 5_000.0  # a million float32 parameters then take 13 ms a step, on two hosts
FAR_MS = 2.0  # round trip; a step has several
CLOCK_MS = 1_000.0


def verdicts(hosts: Hosts) -> list[Verdict]:
    """Return the problems, the worst first; an empty list if there are none."""
    listed = [
        *_on_ways(hosts),
        *_on_builds(hosts.reports),
        *_on_devices(hosts.reports),
        *_on_speeds(hosts),
        *_on_interfaces(hosts.reports),
        *_on_clocks(hosts),
        *_on_run_dir(hosts),
        *_on_rendezvous(hosts),
        *_of_each(hosts.reports),
    ]
    return sorted(listed, key=lambda verdict: verdict.level != FAILS)


def _on_ways(hosts: Hosts) -> Iterator[Verdict]:
    for way in hosts.crossings:
        if way.failure is not None:
            yield Verdict(
                FAILS,
                _between(hosts, way),
                f"no connection: {way.failure}; ranks would wait for each other until a timeout",
                "let these hosts reach each other at all TCP ports (firewall, security group), or "
                "name an interface that leads to both: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
            )


def _on_builds(reports: Sequence[Report]) -> Iterator[Verdict]:
    builds = {report: f"torch {report.torch}" for report in reports if report.torch is not None}
    if len(set(builds.values())) > 1:
        yield Verdict(
            FAILS,
            "torch",
            f"{_who(reports, builds)}: a run refuses ranks of several builds",
            "install the same build on every host",
        )
    pythons = {report: f"Python {report.python}" for report in reports}
    if len({report.python.rpartition(".")[0] for report in reports}) > 1:
        yield Verdict(
            BEWARE,
            "Python",
            f"{_who(reports, pythons)}: a script may draw, sort or load in another way",
            "take the same version on every host",
        )
    drivers = {report: f"driver {report.driver}" for report in reports if report.driver}
    if len(set(drivers.values())) > 1:
        yield Verdict(
            BEWARE,
            "driver",
            f"{_who(reports, drivers)}: NCCL and kernels may choose other ways on each",
            "install the same driver on every host",
        )


def _on_devices(reports: Sequence[Report]) -> Iterator[Verdict]:
    has = {report: "GPUs" if report.gpus else "none that torch sees" for report in reports}
    if len(set(has.values())) > 1:
        yield Verdict(
            FAILS,
            "GPUs",
            f"{_who(reports, has)}: a run refuses ranks of several kinds of devices",
            "see `quorate doctor` on the hosts without; --devices cpu takes no GPU on any",
        )
    elif len({report.gpus for report in reports}) > 1:
        kinds = {report: " and ".join(report.gpus) for report in reports}
        yield Verdict(
            BEWARE,
            "GPUs",
            f"{_who(reports, kinds)}: kernels of several kinds of GPUs round in several ways, and "
            "a run refuses ranks whose first gradients differ",
            "take hosts with one kind of GPU",
        )
    kernels = {report: report.kernels for report in reports}
    if len(set(kernels.values())) > 1 and not all(report.gpus for report in reports):
        yield Verdict(
            BEWARE,
            "processors",
            f"{_who(reports, kernels)}: their kernels round in several ways, and a run refuses "
            "ranks whose first gradients differ",
            "take hosts with one kind of processor; the same ATEN_CPU_CAPABILITY, "
            "ONEDNN_MAX_CPU_ISA and MKL_CBWR on all of them help where makers are the same",
        )


def _on_speeds(hosts: Hosts) -> Iterator[Verdict]:
    measured = [way for way in hosts.crossings if way.mbit_per_s is not None]
    if not measured:
        return
    slowest = min(measured, key=_mbit_per_s)
    if (speed := _mbit_per_s(slowest)) < SLOW_MBIT_PER_S:
        # Each rank sends (N-1)/N of the parameters in each of two phases.
        ranks = sum(report.ranks for report in hosts.reports)
        ms = 2 * (ranks - 1) / ranks * 32e6 / speed / 1e3
        yield Verdict(
            BEWARE,
            _between(hosts, slowest),
            f"{speed:,.0f} Mbit/s: an update of a million float32 parameters takes {ms:,.1f} ms on "
            f"the wire of each of {ranks} ranks, and the ranks of a host share its wire",
            "more rows per update (batch_size), so that there are fewer updates; a faster network",
        )
    farthest = max(measured, key=lambda way: way.ms or 0.0)
    if (farthest.ms or 0.0) > FAR_MS:
        yield Verdict(
            BEWARE,
            _between(hosts, farthest),
            f"{farthest.ms:.1f} ms there and back: every step waits for several of these",
            "take hosts of one place; more rows per update (batch_size)",
        )


def _on_interfaces(reports: Sequence[Report]) -> Iterator[Verdict]:
    for report in reports:
        if report.faster and report.mbit_per_s is not None:
            name, speed = max(report.faster.items(), key=lambda each: each[1])
            yield Verdict(
                BEWARE,
                report.name,
                f"the others are reached by {report.interface} ({report.mbit_per_s:,} Mbit/s), and "
                f"{name} is faster ({speed:,} Mbit/s)",
                f"give torchrun an address of that network (--rdzv-endpoint, --local-addr), or set "
                f"GLOO_SOCKET_IFNAME={name} and NCCL_SOCKET_IFNAME={name}",
            )


def _on_clocks(hosts: Hosts) -> Iterator[Verdict]:
    for way in hosts.crossings:
        if way.one == 0 and abs(way.ahead_ms or 0.0) > CLOCK_MS:
            ahead = (way.ahead_ms or 0.0) / 1000
            yield Verdict(
                BEWARE,
                hosts.reports[way.other].name,
                f"its clock is {abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} that of "
                f"{hosts.reports[0].name}: times in logs and curves jump at a restart",
                "have all hosts follow one clock (chrony, systemd-timesyncd)",
            )


def _on_run_dir(hosts: Hosts) -> Iterator[Verdict]:
    for report in hosts.reports:
        if report.sees_run_dir is not None:
            yield Verdict(
                BEWARE,
                report.name,
                f"the run directory is not that of {hosts.reports[0].name}: {report.sees_run_dir}. "
                "Rank 0 alone writes there: a restart in which it is on this host begins anew",
                "a file system that all hosts have, under the same path",
            )


def _on_rendezvous(hosts: Hosts) -> Iterator[Verdict]:
    if hosts.restarts > 0 and hosts.is_store_shared:
        yield Verdict(
            BEWARE,
            "torchrun",
            "with --nnodes LEAST:MOST, a host that comes back, and those left when the first host "
            "is lost, wait for an address that nobody says any more (torch 2.13)",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host before torchrun",
        )


def _of_each(reports: Sequence[Report]) -> Iterator[Verdict]:
    """Yield the problems of single hosts; a problem of all hosts is reported once."""
    found: dict[Verdict, list[str]] = defaultdict(list)
    for report in reports:
        for verdict in report.verdicts:
            found[verdict].append(report.name)
    for verdict, names in found.items():
        whose = "all hosts" if len(names) == len(reports) else ", ".join(names)
        yield verdict._replace(subject=f"{verdict.subject} ({whose})")


def _mbit_per_s(way: Crossing) -> float:
    return min(way.mbit_per_s or 0.0, way.back_mbit_per_s or 0.0)


def _between(hosts: Hosts, way: Crossing) -> str:
    return f"{hosts.reports[way.one].name} - {hosts.reports[way.other].name}"


def _who(reports: Sequence[Report], what: dict[Report, str]) -> str:
    """Return values and hosts in words: ``torch 2.13.0 on host-a, torch 2.12.0 on host-b``."""
    names: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        if report in what:
            names[what[report]].append(report.name)
    return ", ".join(f"{value} on {' and '.join(hosts)}" for value, hosts in names.items())
