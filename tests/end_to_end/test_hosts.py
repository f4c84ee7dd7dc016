"""Ranks on several hosts: slow, cut off, lost and back again, with the same bits."""

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch.distributed
from support import hosts as several
from support.heard import Heard
from support.hosts import end_all, torchrun
from support.references import References
from support.runs import LIMIT_S, command, digests, inspected, soon

pytestmark = pytest.mark.slow
RANKS = pytest.mark.skipif(not torch.distributed.is_available(), reason="without distributed")
# Without, torchrun's agent of a returning host waits for an address never published (2.13).
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# A store on a separate host, with a longer life than all ranks.
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


def of_ranks(run_dir: Path, nodes: str, steps: int = 8, restarts: int = 0) -> list[str]:
    """Return torchrun's command line of a training with 0.3 s a step on two ranks."""
    options = ("--run-dir", str(run_dir), "--save-every-steps", "2")
    words = command("ranks.py", f"steps={steps}", "pause=0.15", "then=tells", options=options)
    where = "host-c:29400" if restarts else "host-a:29400"
    return torchrun(nodes, 1, *words[1:], at=where, restarts=restarts)


def wait_for(heard: Sequence[Heard], word: str, limit_s: float = LIMIT_S) -> None:
    """Wait until a process says the word."""
    soon(
        lambda: any(word in each.all for each in heard),
        lambda: f"no {word!r}: {[each.all for each in heard]}",
        limit_s,
    )


def ranks_of(run_dir: Path) -> list[int]:
    """Return the processes of a training, without torchrun's own."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and "torch.distributed.run" not in words:
            found.append(process.pid)
    return found


@RANKS
def test_hosts_have_the_bits_of_a_tower(references: References, tmp_path: Path) -> None:
    """Train with fewer shards than ranks, and a slow link between hosts."""
    bits = ("--shards", "2")
    script = command("everything.py", options=(*bits, "--run-dir", str(tmp_path / "run")))[1:]
    with several.hosts(2) as made:
        made[1].slow(1000)
        started = [
            host.start(torchrun("2", per_node, *script, at="host-a:29400"))
            for host, per_node in zip(made, (1, 2), strict=True)
        ]
        ended = end_all(started, LIMIT_S)
    assert [each.code for each in ended] == [0, 0], ended
    expected = references.on_a_tower("everything.py", options=bits).digests
    assert digests(tmp_path / "run") == expected
    assert inspected(tmp_path / "run")["doubts"] == []
    first = next(each.out for each in ended if "ranks met at" in each.out)
    assert "ranks met at host-a:" in first
    assert "gloo listens on 10.231.7." in first  # and not at 127.0.1.1, the host's name


@RANKS
def test_the_doctor_measures_a_slow_link_and_compares_run_directories(tmp_path: Path) -> None:
    own = tmp_path / "host-b"
    own.mkdir()
    doctor = ("-m", "quorate", "doctor", "--json", "--run-dir", str(tmp_path))
    words = torchrun("2", 2, *doctor, at="host-a:29400", restarts=1)
    # The second host has another folder there.
    other = ["sh", "-c", f'mount --bind "{own}" "{tmp_path}" && exec "$@"', "sh", *words]
    with several.hosts(2) as two:
        for host in two:
            host.slow(1000)
        first, second = end_all([two[0].start(words), two[1].start(other)], LIMIT_S)
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert "hosts" not in second.out  # the first host prints all
    found = json.loads(first.out[first.out.index("{") :])
    assert [report["address"] for report in found["reports"]] == ["10.231.7.1", "10.231.7.2"]
    (way,) = found["crossings"]
    assert 0 < way["ms"] < 60
    assert 100 < way["mbit_per_s"] < 1_050
    assert abs(way["ahead_ms"]) < way["ms"] / 2 + 1
    said = {verdict["subject"]: verdict["what"] for verdict in found["verdicts"]}
    assert re.search("Mbit/s: an update of a million|there and back", said["host-a - host-b"])
    assert "the run directory is not that of host-a" in said["host-b"]
    assert "a host that comes back" in said["torchrun"]
    assert not [*tmp_path.glob(".quorate-doctor-*")]


# --- cut links, and lost hosts --------------------------------------------------------------------


@RANKS
def test_a_link_is_cut_for_4_s_and_for_good(tmp_path: Path) -> None:
    """Cut for a while: nobody is lost. Then all end, and name the host behind the cut link."""
    run_dir = tmp_path / "run"
    words = of_ranks(run_dir, "2", steps=1000)
    with several.hosts(2) as two:
        heard = [Heard(host.start(words)) for host in two]
        wait_for(heard, "made step 4 ")
        two[1].cut()
        time.sleep(4)
        two[1].mend()
        made = max(int(n) for each in heard for n in re.findall(r"made step (\d+)", each.all))
        wait_for(heard, f"made step {made + 3} ")
        assert len(ranks_of(run_dir)) == 2
        two[1].cut()
        soon(lambda: not ranks_of(run_dir), lambda: [each.all for each in heard])
        two[1].kill()  # torchrun waits for minutes for its store, on the first host
        codes = [each.ended(60) for each in heard]
    assert codes[0] != 0
    for each, lost in zip(heard, ("host-b", "host-a"), strict=True):
        (line,) = [line for line in each.lines if line.startswith("quorate: ")]
        assert lost in line
    assert inspected(run_dir)["global_step"] >= made + 2


@RANKS
def test_the_host_of_rank_0_is_lost_and_where_they_meet_is_elsewhere(
    references: References, tmp_path: Path
) -> None:
    words = of_ranks(tmp_path / "run", "1:2", restarts=3)
    with several.hosts(3) as three:
        store = Heard(three[2].start([sys.executable, "-c", STORE]))
        store.wait_for("listens")
        heard = [Heard(host.start(words, ELASTIC)) for host in three[:2]]
        wait_for(heard, "made step 4 on 2")
        lost = 0 if "made step" in heard[0].all else 1  # printed by rank 0
        three[lost].die()
        assert heard[1 - lost].ended(120) == 0, heard[1 - lost].all
        assert "on 1\n" in heard[1 - lost].all
        three[2].kill()
        for each in (store, heard[lost]):
            each.ended(60)
    tower = references.on_a_tower("ranks.py")
    assert digests(tmp_path / "run") == tower.digests
