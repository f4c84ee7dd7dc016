"""The command ``doctor``: on this machine, with drivers that hang; verdicts on made facts."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import nvml
from support.at_the_command import QUORATE
from support.keys import keys_of
from support.messages import expect_message
from support.runs import processes_of, run, torchrun
from support.warm import WARM

from quorate.__main__ import main
from quorate.commands.doctor import facts
from quorate.commands.doctor.ask import ask
from quorate.commands.doctor.facts import Facts, Gpu, Holder
from quorate.commands.doctor.hosts import verdicts as of_hosts
from quorate.commands.doctor.hosts.facts import Crossing, Hosts, Report
from quorate.commands.doctor.hosts.table import rows
from quorate.commands.doctor.table import shown, text
from quorate.commands.doctor.verdict import FAILS, Verdict
from quorate.commands.doctor.verdicts import verdicts
from quorate.commands.doctor.wanted import Wanted, named_devices
from quorate.machine.visible_devices import Selection, VisibleGpu

SCRIPTS = Path(__file__).parents[1] / "scripts"
COMMAND = [*QUORATE, "doctor", "--json"]

# Begins the command with few descriptors and on one core.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.argv[1], sys.argv[1:])
"""
HANGS = """
import time


def nvmlInit():
    time.sleep(1000)
"""


def told(command: list[str], code: int, **environment: str) -> dict[str, Any]:
    env = {**os.environ, **environment}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env)
    assert ended.returncode == code, ended
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def first(folder: Path) -> str:
    """Return a path for modules, with a folder in front of the present path."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def about(found: dict[str, Any], subject: str) -> list[str]:
    """Return level, problem and cure of each verdict on a subject."""
    of_it = [v for v in found["verdicts"] if v["subject"] == subject]
    return [f"{v['level']}: {v['what']}; {v['cure']}" for v in of_it]


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs several cores")
def test_few_descriptors_one_core_hidden_gpus_and_a_driver_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(HANGS)
    command = [sys.executable, "-c", LIMITED, *COMMAND, "--workers", "8"]
    found = told(command, code=1, CUDA_VISIBLE_DEVICES="-1", PYTHONPATH=first(tmp_path))
    assert not found["works"]
    (files,), (gpus,) = about(found, "descriptors"), about(found, "GPUs")
    assert files.startswith("fails: ")
    needs = "may open 40 files (ulimit -n), and a run needs 59 (4 for each of 8 worker processes)"
    assert needs in files
    cores, waiting = about(found, "cores")
    assert f"may run on 1 of {os.cpu_count()} cores (affinity" in cores
    assert "8 workers x 1 thread on 1 core" in waiting
    assert "CUDA_VISIBLE_DEVICES='-1': '-1' is negative, which hides every GPU" in gpus
    assert "no answer within 5 s from the NVIDIA driver" in about(found, "driver")[0]
    assert processes_of(str(tmp_path)) == {}


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA")
def test_gpus_that_are_idle_because_torch_is_built_without_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pynvml.py").write_text(nvml.IN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0")
    assert main(["doctor", "--devices", "cuda", "--workers", "1"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    in_use = "NVIDIA H200, 10.0 of 141.0 GiB in use, busy 87%, 18 NVLinks"
    for line in (
        "driver 580.65.06, for CUDA up to 13.0",
        f"GPUs physical 0 = GPU-aaaa {in_use}",
        f"held by process {os.getpid()} (",
        f"physical 1 = GPU-bbbb {in_use}",
        "physical 2: GPU is lost",
        "links 0 - 1: NVLink, direct",
        "visible cuda:0 = physical 1 = GPU-bbbb: torch does not see it",
        "cuda:1 = physical 0 = GPU-aaaa: torch does not see it",
        "environment CUDA_VISIBLE_DEVICES='1, 0'",
        f"fails cuda: torch sees no GPU: torch {torch.__version__} is built without",
        "beware torch: 2 GPUs are idle",
        "beware GPU 2: the driver lists it and cannot reach it: GPU is lost",
    ):
        assert line in text


def test_a_torch_that_cannot_be_imported_is_explained(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    found = told([*COMMAND, "--devices", "mps"], code=1, PYTHONPATH=first(tmp_path))
    (said,) = about(found, "torch")
    assert said == (
        "fails: it cannot be imported: ImportError: libcudart.so.13: cannot open; "
        "install it again: pip install torch"
    )
    assert about(found, "mps") == []  # of devices nothing is known then, and nothing is said


# --- questions to drivers -------------------------------------------------------------------------


def test_a_question_that_blocks_is_cut_off_and_what_was_answered_counts(tmp_path: Path) -> None:
    """Every question has a separate time limit."""
    text = """
import json, os, time

def run():
    for number in range(3):
        print("a library's own words\\n7", flush=True)
        print(json.dumps({"asking": f"GPU {number}"}), flush=True)
        time.sleep(0.4)
        print(json.dumps({"gpu": os.getpid()}), flush=True)
    print(json.dumps({"asking": "GPU 3"}), flush=True)
    time.sleep(1000)
"""
    (tmp_path / "ask_this.py").write_text(text)
    begun = time.monotonic()
    found = ask("ask_this", [str(tmp_path)], answer_s=0.9)
    assert found.failure == "no answer within 0.9 s from GPU 3"
    assert time.monotonic() - begun < 40  # of the 60 s until a first question
    assert not psutil.pid_exists(found.first("gpu"))


# --- several hosts, and a script ------------------------------------------------------------------


def test_ranks_of_one_machine_say_once_what_the_doctor_says_of_it() -> None:
    done = run(torchrun(2, "-m", "quorate", "doctor"))
    assert done.code == 0, done.err
    assert done.out.count("a run would work") == 1


def test_the_model_of_a_script_is_measured() -> None:
    words = ["doctor", "--json", "--devices", "cpu", str(SCRIPTS / "everything.py")]
    code, out, err = WARM.run(words, os.environ, 120)
    assert code == 0, out + err
    found = json.loads(out)
    expect_message(keys_of(found))
    assert found["names"] == ["norm", "embedding", "lstm", "dropout", "classes", "words"]
    assert (found["rows"], found["calls"], found["works"]) == (6, 1, True)
    # Adam: two vectors and a step for each parameter, except for unused parameters.
    assert 1.9 < found["optimizer_bytes"] / found["trained_bytes"] < 2.1
    assert sum(cost["parameter_bytes"] for cost in found["costs"]) == found["parameter_bytes"]
    lstm = found["costs"][found["names"].index("lstm") + 1]
    assert lstm["kept_bytes"] == max(cost["kept_bytes"] for cost in found["costs"])
    assert found["said"][1].startswith("2 devices: cut before ")


GIB, MIB = 1 << 30, 1 << 20


def gpu(index: int, **changes: Any) -> Gpu:
    values: dict[str, Any] = {
        **{"uuid": f"GPU-{index}", "name": "NVIDIA H200", "memory_bytes": GIB, "use": 0.0},
        **{"memory_total_bytes": 141 * GIB, "compute_mode": "shared", "nvlinks": 18},
        **{"is_cut": False, "slices": (), "holders": ()},
    }
    return Gpu(index, **{**values, **changes})


HOST = facts.Host("AMD EPYC", 64, 32, 64, None, 2, 256 * GIB, 200 * GIB, None)
LIMITS = facts.ProcessLimits(None, 65536, None, None, None, "/tmp", None, 50 * GIB)
TORCH = facts.Torch("1.2.3+cu130", "13.0", None, "cuda", 32, True, "91002", True, True, None, None)
VISIBLE = tuple(VisibleGpu(index, f"GPU-{index}") for index in range(2))
WELL = Facts(
    environment={},
    driver=facts.Driver("580.65.06", "13.0", None),
    gpus=(gpu(0), gpu(1)),
    lost={},
    links=(facts.Link(0, 1, "NVLink", True),),
    selection=Selection(VISIBLE, None),
    torch=TORCH,
    accelerators=tuple(
        facts.Accelerator(f"cuda:{n}", visible, None) for n, visible in enumerate(VISIBLE)
    ),
    host=HOST,
    limits=LIMITS,
    interfaces=(facts.NetworkInterface("eth0", ("10.0.0.2",), 25_000, False),),
)
LAPTOP = replace(
    WELL,
    driver=facts.Driver(None, None, "NVML Shared Library Not Found"),
    gpus=(),
    links=(),
    selection=Selection((), None),
    torch=replace(TORCH, version="1.2.3+cpu", cuda=None, accelerator=None, nccl=False),
    accelerators=(),
)


def host(**changes: Any) -> Facts:
    return replace(LAPTOP, host=replace(HOST, **changes))


def limited(**changes: Any) -> Facts:
    return replace(LAPTOP, limits=replace(LIMITS, **changes))


def hidden(value: str, remark: str | None, *visible: VisibleGpu, **changes: Any) -> Facts:
    return replace(
        WELL,
        environment={"CUDA_VISIBLE_DEVICES": value},
        selection=Selection(visible, remark),
        accelerators=tuple(a for a in WELL.accelerators if a.visible in visible),
        **changes,
    )


def first_gpu(**changes: Any) -> Facts:
    return replace(WELL, gpus=(gpu(0, **changes), gpu(1)))


def built(**changes: Any) -> Facts:
    return replace(WELL, torch=replace(TORCH, **changes), accelerators=())


BUSY = {"memory_bytes": 140 * GIB + 800 * MIB, "holders": (Holder(4242, "python", 140 * GIB),)}
TORCH_HANGS = replace(
    WELL, torch=replace(TORCH, failure="no answer within 5 s from cuda:1 to compute")
)
DRIVER_HANGS = replace(WELL, driver=facts.Driver(None, None, "no answer within 5 s from GPU 0"))

# Facts; the wishes for a run.
WRONG: dict[str, tuple[Facts, dict[str, Any]]] = {
    "GPUs hidden by -1": (hidden("-1", "'-1' is negative, which hides every GPU"), {}),
    "one GPU hidden": (hidden("1", None, VISIBLE[1]), {}),
    "list of GPUs ends early": (
        hidden("0,7,1", "entry 2, '7', is none of the 2 GPUs here", VISIBLE[0]),
        {},
    ),
    "several kinds of GPUs": (
        hidden("0,1", None, *VISIBLE, gpus=(gpu(0), gpu(1, name="NVIDIA T400"))),
        {},
    ),
    "no segments": (limited(segment_error="shared memory: 64 MiB cannot be had; use less"), {}),
    "few descriptors": (limited(files=49, files_most=None), {"workers": 8}),
    "descriptors for no script's own": (limited(files=200, files_most=200), {"workers": 8}),
    "no /proc": (host(memory_bytes=None, memory_free_bytes=None), {}),
    "a container's cores": (host(cores_limit=1.5), {}),
    "affinity": (host(cores_allowed=4), {}),
    "two GPUs and one core": (replace(WELL, host=replace(HOST, cores_allowed=1)), {}),
    "too many threads": (LAPTOP, {"workers": 16, "threads": 8}),
    "no memory": (host(memory_free_bytes=300 * MIB), {"workers": 2}),
    "few addresses": (limited(address_bytes=4 * GIB), {}),
    "no temporary folder": (limited(temporary="/gone", temporary_error="No such file"), {}),
    "a full temporary folder": (limited(temporary_free_bytes=MIB), {}),
    "no torch": (built(version=None, failure="ImportError: libtorch.so"), {"devices": ("cpu",)}),
    "torch hangs": (TORCH_HANGS, {}),
    "the driver hangs": (DRIVER_HANGS, {}),
    "no driver": (replace(LAPTOP, torch=TORCH), {}),
    "idle GPUs": (built(version="1.2.3+cpu", cuda=None), {}),
    "a lost GPU": (replace(WELL, lost={2: "GPU is lost"}), {}),
    "no such GPU": (WELL, {"devices": ("cuda:5",)}),
    "no GPU, by the build": (LAPTOP, {"devices": ("cuda",)}),
    "no GPU, by an old driver": (built(why_none="The driver is too old"), {"devices": ("cuda",)}),
    "a GPU that does not compute": (
        replace(WELL, accelerators=(facts.Accelerator("cuda:0", VISIBLE[0], "no kernel image"),)),
        {},
    ),
    "a full GPU": (first_gpu(**BUSY), {}),
    "a prohibited GPU": (first_gpu(compute_mode="prohibited"), {}),
    "an exclusive GPU": (first_gpu(compute_mode="exclusive", holders=(Holder(7, None, None),)), {}),
    "GPUs without a link": (replace(WELL, links=(facts.Link(0, 1, "two NUMA nodes", False),)), {}),
}
RIGHT: list[tuple[Facts, dict[str, Any]]] = [
    (WELL, {}),
    (LAPTOP, {}),
    (WELL, {"devices": ("cuda:1", "cpu"), "workers": 4}),
    (limited(files=256), {"workers": 32, "threads": 1}),
    (first_gpu(**BUSY), {"devices": ("cpu",)}),  # an unused device may be full
    (replace(WELL, environment={"NCCL_SOCKET_IFNAME": "^docker"}), {}),
    (replace(WELL, links=(facts.Link(0, 1, "", False),)), {"devices": ("cuda:1",)}),
    (replace(LAPTOP, environment={"CUDA_VISIBLE_DEVICES": "0"}), {}),  # there is no driver
]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_and_what_helps(name: str) -> None:
    machine, wanted = WRONG[name]
    conclusion, *_, wrong = shown(machine, verdicts(machine, Wanted(**wanted))).split("\n\n")
    assert max(map(len, wrong.splitlines())) <= 100
    expect_message(f"{conclusion}\n{wrong}")


def test_what_does_not_matter() -> None:
    for machine, wanted in RIGHT:
        assert verdicts(machine, Wanted(**wanted)) == []
    expect_message(shown(WELL, []))
    assert named_devices("gpu:1, cpu+/device:GPU:0") == ("cuda:1", "cpu", "cuda:0")


# --- several hosts --------------------------------------------------------------------------------

FIRST_FACTS: dict[str, Any] = {
    **{"name": "host-a", "address": "10.0.0.1", "interface": "eth0", "mbit_per_s": 10_000},
    **{"faster": {}, "ranks": 2, "torch": "1.2.3", "cuda": None, "python": "3.11.7"},
    **{"kernels": "AuthenticAMD AVX512", "gpus": (), "driver": None, "sees_run_dir": None},
    "verdicts": (),
}
FIRST = Report(**FIRST_FACTS)
WAY = Crossing(0, 1, ms=0.1, mbit_per_s=9_400.0, back_mbit_per_s=9_300.0, ahead_ms=0.2)
FEW = Verdict(FAILS, "descriptors", "few", "more")


def second(first: Report = FIRST, **changes: Any) -> tuple[Report, Report]:
    return first, replace(first, name="host-b", address="10.0.0.2", **changes)


def hosts(
    reports: tuple[Report, ...] = (), way: dict[str, Any] | None = None, **changes: Any
) -> Hosts:
    ways = (replace(WAY, **(way or {})),)
    found = Hosts(reports or second(), ways, "host-a:29500", None, restarts=0, is_store_shared=True)
    return replace(found, **changes)


HOSTS: dict[str, Hosts] = {
    "equal hosts": hosts(run_dir="/runs"),
    "another torch": hosts(second(torch="1.2.2")),
    "another processor": hosts(second(kernels="GenuineIntel AVX2")),
    "a faster interface": hosts(second(faster={"ib0": 200_000})),
    "no run directory": hosts(second(sees_run_dir="/runs: none"), run_dir="/runs"),
    "a verdict of one": hosts(second(verdicts=(FEW,))),
    # 4 ranks, 1,000 Mbit/s: each sends 2 x 3/4 of 32 Mbit for a million parameters, in 48 ms.
    "slow": hosts(way={"mbit_per_s": 1_000.0}),
    "far": hosts(way={"ms": 12.0}),
    "no connection": hosts(way={"failure": "10.0.0.2 port 4: refused"}),
    "clocks": hosts(way={"ahead_ms": -90_000.0}),
    "restarts with a store of their own": hosts(restarts=3, is_store_shared=False),
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_said_of_several_hosts(name: str) -> None:
    expect_message(text([*rows(HOSTS[name])], of_hosts.verdicts(HOSTS[name])))
