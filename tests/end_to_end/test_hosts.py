"""Ranks on several hosts, which are slow, cut off, lost and back again: the same bits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed
from support import hosts as several
from support.hosts import Host, end_all, torchrun
from support.references import References
from support.runs import SCRIPTS, Ended, digests

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.slow,
]
LASTING = str(SCRIPTS / "between_hosts.py")
RUN = ("-m", "quorate", "run", "--devices", "cpu")
DOCTOR = ("-m", "quorate", "doctor", "--json")
# Without, torchrun's agent of a host that comes back waits for an address that nobody says (2.13).
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SHARD_S = 0.15  # of the training that lasts: 0.3 s a step on two ranks

# A store that is on a host of its own, and outlives all others.
STORE = """
import time, torch.distributed
store = torch.distributed.TCPStore("host-c", 29400, is_master=True, wait_for_workers=False)
print("listens", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if (why := several.obstacle()) is not None:
        pytest.skip(why)


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with several.hosts(2) as made:
        yield made


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with several.hosts(3) as made:
        yield made


def said_digest(out: str) -> str:
    (line,) = re.findall(r"^digest (\w+)$", out, re.MULTILINE)
    return str(line)


def lasting(run_dir: Path, steps: int = 16) -> list[str]:
    return [LASTING, str(run_dir), str(steps), str(SHARD_S)]


def undisturbed(references: References, steps: int = 16) -> str:
    """Return the digest of the training that lasts, on one tower."""

    def compute() -> str:
        command = [sys.executable, *RUN, "--engine", "towers", "--workers", "1", LASTING]
        folder = references._folder / f"lasting-{steps}"
        done = subprocess.run(
            [*command, str(folder), str(steps), "0"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return said_digest(done.stdout)

    return str(references.once(compute, "between_hosts", steps))


def ranks_of(run_dir: Path) -> list[int]:
    """Return the processes of a training that lasts, without torchrun's own."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and "torch.distributed.run" not in words:
            found.append(process.pid)
    return found


class Heard:
    """What processes print, while they live. A thread reads each."""

    def __init__(self, *processes: subprocess.Popen[str]) -> None:
        self._processes = processes
        self.lines: list[list[str]] = [[] for _ in processes]
        pairs = zip(processes, self.lines, strict=True)
        self._threads = [threading.Thread(target=self._read, args=pair) for pair in pairs]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        lines.extend(iter(process.stdout.readline, ""))

    @property
    def all(self) -> str:
        """What all have printed so far."""
        return "".join("".join(lines) for lines in self.lines)

    def wait_for(self, word: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while word not in self.all:
            assert time.monotonic() < deadline, f"no {word!r} within {limit_s:g} s: {self.all}"
            time.sleep(0.05)

    def ended(self, limit_s: float, but: tuple[int, ...] = ()) -> list[Ended]:
        """Wait for all to end, but for some."""
        deadline = time.monotonic() + limit_s
        found = []
        for number, process in enumerate(self._processes):
            if number not in but:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pytest.fail(f"process {number} lives on after {limit_s:g} s: {self.all}")
                self._threads[number].join()
            found.append(Ended(process.returncode, "".join(self.lines[number]), ""))
        return found


# --- the same bits --------------------------------------------------------------------------------


def everything(made: list[Host], per_node: int, run_dir: Path) -> list[Ended]:
    script = [*RUN, "--shards", "4", "--run-dir", str(run_dir), str(SCRIPTS / "everything.py")]
    words = torchrun(str(len(made)), per_node, *script, at="host-a:29400")
    ended = end_all([host.start(words) for host in made], 120)
    assert [each.code for each in ended] == [0] * len(made), ended
    return ended


@pytest.mark.parametrize("per_node", [1, 2])
def test_two_hosts_have_the_bits_of_a_tower(
    per_node: int, two: list[Host], references: References, tmp_path: Path
) -> None:
    first, _ = everything(two, per_node, tmp_path / "run")
    expected = references.on_a_tower("everything.py", options=("--shards", "4")).digests
    assert digests(tmp_path / "run") == expected
    assert "ranks met at host-a:" in first.out
    assert "gloo listens on eth0, 10.231.7.1" in first.out  # and not at 127.0.1.1, the host's name


def test_three_hosts_one_of_them_behind_a_slow_link_have_the_bits_of_a_tower(
    three: list[Host], references: References, tmp_path: Path
) -> None:
    three[1].slow(1000)
    three[1].delay(5)
    everything(three, 1, tmp_path / "run")
    expected = references.on_a_tower("everything.py", options=("--shards", "4")).digests
    assert digests(tmp_path / "run") == expected


# --- the doctor -----------------------------------------------------------------------------------


def test_the_doctor_measures_a_slow_link_and_compares_run_directories(
    two: list[Host], tmp_path: Path
) -> None:
    for host in two:
        host.slow(1000)
    two[1].delay(5)
    own = tmp_path / "host-b"
    own.mkdir()
    words = torchrun("2", 2, *DOCTOR, "--run-dir", str(tmp_path), at="host-a:29400", restarts=1)
    # The second host has another folder there.
    other = ["sh", "-c", f'mount --bind "{own}" "{tmp_path}" && exec "$@"', "sh", *words]
    first, second = end_all([two[0].start(words), two[1].start(other)], 90)
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert "hosts" not in second.out  # the first one says all
    found = json.loads(first.out[first.out.index("{") :])
    assert [report["address"] for report in found["reports"]] == ["10.231.7.1", "10.231.7.2"]
    (way,) = found["crossings"]
    assert 9.5 < way["ms"] < 60
    assert 100 < way["mbit_per_s"] < 1_050
    assert abs(way["ahead_ms"]) < way["ms"] / 2 + 1
    said = {verdict["subject"]: verdict["what"] for verdict in found["verdicts"]}
    assert "Mbit/s: an update of a million" in said["host-a - host-b"] or (
        "there and back" in said["host-a - host-b"]
    )
    assert "the run directory is not that of host-a" in said["host-b"]
    assert "a host that comes back" in said["torchrun"]
    assert not [*tmp_path.glob(".quorate-doctor-*")]


# --- links that are cut ---------------------------------------------------------------------------


def test_a_link_that_is_cut_for_five_seconds_changes_no_bit(
    two: list[Host], references: References, tmp_path: Path
) -> None:
    words = torchrun("2", 1, *lasting(tmp_path / "run"), at="host-a:29400", restarts=3)
    heard = Heard(*(host.start(words) for host in two))
    heard.wait_for("made step 4", 60)
    two[1].cut()
    time.sleep(5)
    two[1].mend()
    first, _ = heard.ended(120)
    assert said_digest(first.out) == undisturbed(references)


def test_ranks_end_and_name_the_host_that_is_cut_off(two: list[Host], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = torchrun("2", 1, *lasting(run_dir), at="host-a:29400")
    heard = Heard(*(host.start(words) for host in two))
    heard.wait_for("made step 4", 60)
    assert len(ranks_of(run_dir)) == 2
    two[1].cut()
    deadline = time.monotonic() + 60
    while ranks_of(run_dir):
        assert time.monotonic() < deadline, heard.all
        time.sleep(0.1)
    two[1].kill()  # torchrun itself waits for minutes for its store, which is on the first host
    one, other = heard.ended(60)
    assert one.code != 0
    for ended, lost in ((one, "host-b"), (other, "host-a")):
        (line,) = re.findall(r"^quorate: .*", ended.out, re.MULTILINE)
        assert lost in line
    assert "saved step" in one.out


# --- hosts that are lost --------------------------------------------------------------------------


def test_the_others_go_on_without_a_host_that_is_lost_and_with_it_when_it_is_back(
    two: list[Host], references: References, tmp_path: Path
) -> None:
    steps = 60
    script = lasting(tmp_path / "run", steps)
    words = torchrun("1:2", 1, *script, at="host-a:29400", restarts=3)
    heard = Heard(*(host.start(words, ELASTIC) for host in two))
    heard.wait_for("made step 4 on 2", 60)
    two[1].die()
    heard.wait_for("on 1\n", 60)
    two[1].mend()
    again = Heard(two[1].start(words, ELASTIC))
    made_on_1 = heard.all.count("on 1\n")
    heard.wait_for("step 60 on 2", 120)
    first, _ = heard.ended(60, but=(1,))
    assert first.code == 0
    assert said_digest(first.out) == undisturbed(references, steps)
    assert made_on_1 < steps
    (late,) = again.ended(60)
    assert late.code == 0, late.out


def test_the_host_of_rank_0_is_lost_and_where_they_meet_is_elsewhere(
    three: list[Host], references: References, tmp_path: Path
) -> None:
    store = Heard(three[2].start([sys.executable, "-c", STORE]))
    store.wait_for("listens", 30)
    words = torchrun("1:2", 1, *lasting(tmp_path / "run"), at="host-c:29400", restarts=3)
    heard = Heard(*(host.start(words, ELASTIC) for host in three[:2]))
    heard.wait_for("made step 4 on 2", 60)
    lost = 0 if heard.lines[0] and any("made step" in line for line in heard.lines[0]) else 1
    three[lost].die()
    left = heard.ended(120, but=(lost,))[1 - lost]
    assert left.code == 0, left.out
    assert "on 1\n" in left.out
    assert said_digest(left.out) == undisturbed(references)
    three[2].kill()
    store.ended(60)
