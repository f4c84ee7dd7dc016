"""The doctor on several hosts: probes, verdicts, and what torchrun shows of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Any

import pytest

from quorate.commands.doctor.hosts.facts import Crossing, Hosts, Report
from quorate.commands.doctor.hosts.meeting import pairs
from quorate.commands.doctor.hosts.probe import Listener, measure
from quorate.commands.doctor.hosts.table import rows
from quorate.commands.doctor.hosts.verdicts import verdicts
from quorate.commands.doctor.verdict import BEWARE, FAILS, Verdict
from quorate.commands.main import main

WORD = "0123456789abcdef"
FIRST = Report(
    name="host-a",
    address="10.0.0.1",
    interface="eth0",
    mbit_per_s=10_000,
    faster={},
    ranks=2,
    torch="2.13.0",
    cuda=None,
    python="3.11.7",
    kernels="AuthenticAMD AVX512",
    gpus=(),
    driver=None,
    sees_run_dir=None,
    verdicts=(),
)
SECOND = replace(FIRST, name="host-b", address="10.0.0.2")
WAY = Crossing(0, 1, ms=0.1, mbit_per_s=9_400.0, back_mbit_per_s=9_300.0, ahead_ms=0.2)


def hosts(*reports: Report, ways: tuple[Crossing, ...] = (WAY,), **changes: Any) -> Hosts:
    found = Hosts(reports, ways, "host-a:29500", None, restarts=0, is_store_shared=True)
    return replace(found, **changes)


def only(found: Hosts) -> Verdict:
    (verdict,) = verdicts(found)
    return verdict


def test_two_equal_hosts_have_no_verdict() -> None:
    assert verdicts(hosts(FIRST, SECOND)) == []
    listed = [row.text for row in rows(hosts(FIRST, SECOND, run_dir="/runs"))]
    assert listed[0] == "2 hosts with 4 ranks met at host-a:29500 (torchrun's store, on all " + (
        "interfaces)"
    )
    assert "host-a - host-b: 0.10 ms there and back, 9,400 and 9,300 Mbit/s" in listed
    assert "host-b: 0.20 ms ahead of host-a (+- 0.05)" in listed
    assert "/runs: the same on all hosts" in listed


@pytest.mark.parametrize(
    ("other", "level", "subject", "what"),
    [
        ({"torch": "2.12.0"}, FAILS, "torch", "torch 2.13.0 on host-a, torch 2.12.0 on host-b"),
        ({"python": "3.12.1"}, BEWARE, "Python", "Python 3.12.1 on host-b"),
        ({"gpus": ("NVIDIA H200",)}, FAILS, "GPUs", "none that torch sees on host-a, GPUs on"),
        ({"kernels": "GenuineIntel AVX2"}, BEWARE, "processors", "GenuineIntel AVX2 on host-b"),
        ({"faster": {"ib0": 200_000}}, BEWARE, "host-b", "ib0 is faster (200,000 Mbit/s)"),
        ({"sees_run_dir": "/runs: none"}, BEWARE, "host-b", "is not that of host-a: /runs: none"),
        (
            {"verdicts": (Verdict(FAILS, "descriptors", "few", "more"),)},
            FAILS,
            "descriptors (host-b)",
            "few",
        ),
    ],
)
def test_a_host_that_differs_is_named(
    other: dict[str, Any], level: str, subject: str, what: str
) -> None:
    verdict = only(hosts(FIRST, replace(SECOND, **other)))
    assert (verdict.level, verdict.subject) == (level, subject)
    assert what in verdict.what
    assert verdict.cure


def test_kinds_of_gpus_and_drivers_are_compared_where_all_have_gpus() -> None:
    one = replace(FIRST, gpus=("A",), driver="550")
    found = verdicts(hosts(one, replace(SECOND, gpus=("B",), driver="560", kernels="other")))
    assert {verdict.subject for verdict in found} == {"GPUs", "driver"}
    assert {verdict.level for verdict in found} == {BEWARE}


def test_what_is_wrong_on_all_hosts_is_said_once() -> None:
    wrong = (Verdict(BEWARE, "cores", "one", "more"),)
    verdict = only(hosts(replace(FIRST, verdicts=wrong), replace(SECOND, verdicts=wrong)))
    assert verdict.subject == "cores (all hosts)"


@pytest.mark.parametrize(
    ("way", "level", "what"),
    [
        ({"mbit_per_s": 1_000.0}, BEWARE, "1,000 Mbit/s: an update of a million float32 para"),
        ({"ms": 12.0}, BEWARE, "12.0 ms there and back"),
        ({"failure": "10.0.0.2 port 4: refused"}, FAILS, "no connection: 10.0.0.2 port 4: refused"),
        ({"ahead_ms": -90_000.0}, BEWARE, "its clock is 90.0 s behind that of host-a"),
    ],
)
def test_what_lies_between_two_hosts_is_judged(way: dict[str, Any], level: str, what: str) -> None:
    verdict = only(hosts(FIRST, SECOND, ways=(replace(WAY, **way),)))
    assert verdict.level == level
    assert what in verdict.what


def test_the_time_on_the_wire_is_that_of_a_ring() -> None:
    """4 ranks, 1,000 Mbit/s: each sends 2 x 3/4 of 32 Mbit for a million parameters."""
    verdict = only(hosts(FIRST, SECOND, ways=(replace(WAY, back_mbit_per_s=1_000.0),)))
    assert "takes 48.0 ms on the wire of each of 4 ranks" in verdict.what


def test_restarts_want_a_store_that_is_not_shared() -> None:
    assert verdicts(hosts(FIRST, SECOND, restarts=3, is_store_shared=False)) == []
    verdict = only(hosts(FIRST, SECOND, restarts=3))
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in verdict.cure


def test_each_two_of_few_hosts_are_measured_and_of_many_each_and_the_next() -> None:
    assert pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert pairs(6) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 2), (0, 3), (0, 4), (0, 5)]


def test_reports_go_through_json() -> None:
    report = replace(FIRST, verdicts=(Verdict(FAILS, "torch", "what", "cure"),), gpus=("A",))
    assert asdict(Report.from_json(json.loads(json.dumps(asdict(report))))) == asdict(report)


def test_probes_measure_this_machine_and_strangers_hear_nothing() -> None:
    with closing(Listener("127.0.0.1", WORD)) as listener:
        found = measure("127.0.0.1", listener.port, WORD)
        assert 0 < found.ms < 1_000
        assert found.mbit_per_s > 10
        assert found.back_mbit_per_s > 10
        assert abs(found.ahead_ms) < 1_000
        with socket.create_connection(("127.0.0.1", listener.port), 5) as stranger:
            stranger.sendall(b"x" * 16 + b"p")
            with suppress(ConnectionResetError):  # what it sent was not read to the end
                assert stranger.recv(8) == b""
        port = listener.port
    with pytest.raises(OSError, match="refused"):
        measure("127.0.0.1", port, WORD)


def test_a_run_directory_is_compared_between_hosts_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--run-dir", "runs"]) == 2
    assert "run_dir: got 'runs', expected several hosts" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_one_machine_say_once_what_the_doctor_says_of_it() -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*start, "-m", "quorate", "doctor"], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a run would work") == 1
