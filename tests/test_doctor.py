"""The doctor: what it finds under real limits; its verdicts on made facts; that it never hangs."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from quorate import control_group
from quorate.cli import main
from quorate.doctor.ask import ask
from quorate.doctor.facts import (
    Accelerator,
    Driver,
    Facts,
    Gpu,
    Holder,
    Host,
    Interface,
    Limits,
    Link,
    Torch,
)
from quorate.doctor.limits import limits
from quorate.doctor.table import shown
from quorate.doctor.verdicts import BEWARE, FAILS, Verdict, Wanted, verdicts
from quorate.visible_devices import Selection, Visible

GIB, MIB = 1 << 30, 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="control groups, /dev/shm")


# --- the command, under real limits ---------------------------------------------------------------

COMMAND = [sys.executable, "-m", "quorate", "doctor", "--json"]

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
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **environment},
    )
    assert ended.returncode == code, ended
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def about(found: dict[str, Any], subject: str) -> dict[str, Any]:
    (verdict,) = [v for v in found["verdicts"] if v["subject"] == subject]
    return dict(verdict)


def asking(module: str) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if module in (process.info["cmdline"] or [])
    ]


@LINUX
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is all there is")
def test_few_descriptors_one_core_hidden_gpus_and_a_driver_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(HANGS)
    found = told(
        [sys.executable, "-c", LIMITED, *COMMAND, "--workers", "8"],
        code=1,
        CUDA_VISIBLE_DEVICES="-1",
        PYTHONPATH=str(tmp_path),
    )
    assert not found["works"]
    files = about(found, "descriptors")
    assert files["level"] == FAILS
    assert (
        "may open 40 files (ulimit -n), and a run needs 50 (4 for each of 8 worker processes)"
        in files["what"]
    )
    assert files["cure"]
    (cores, waiting) = [v for v in found["verdicts"] if v["subject"] == "cores"]
    assert f"may run on 1 of {os.cpu_count()} cores (affinity" in cores["what"]
    assert "8 workers x 1 threads on 1 cores" in waiting["what"]
    gpus = about(found, "GPUs")
    assert gpus["level"] == BEWARE
    assert "CUDA_VISIBLE_DEVICES='-1': '-1' is negative, which hides every GPU" in gpus["what"]
    assert "unset CUDA_VISIBLE_DEVICES" in gpus["cure"]
    assert "no answer within 5 s from the NVIDIA driver" in about(found, "driver")["what"]
    assert not [pid for pid in asking("ask_nvml") if str(tmp_path) in environment_of(pid)]


def environment_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).environ())
    except psutil.Error:
        return ""


@pytest.fixture
def group() -> Iterator[Callable[[], str]]:
    """A control group of one and a half cores, and the command by which a shell enters it."""
    version_1, version_2 = control_group.ROOT / "cpu", control_group.ROOT / "cgroup.controllers"
    parent = version_1 if (version_1 / "cpu.cfs_quota_us").exists() else control_group.ROOT
    name = parent / f"quorate-test-{os.getpid()}"
    try:
        if parent is not version_1 and "cpu" not in version_2.read_text().split():
            raise OSError("no controller of cores here")
        name.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if parent is version_1:
            (name / "cpu.cfs_quota_us").write_text("150000")
            (name / "cpu.cfs_period_us").write_text("100000")
        else:
            (name / "cpu.max").write_text("150000 100000")
    except OSError as error:
        name.rmdir()
        pytest.skip(f"no limit can be set: {error}")
    yield lambda: f"echo $$ > {name}/cgroup.procs"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:  # its processes are gone, and the kernel may not know yet
        try:
            name.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            break


def can_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0
    except OSError:
        return False


@LINUX
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is all there is")
def test_a_container_with_little_shared_memory_and_few_cores(group: Callable[[], str]) -> None:
    if not can_mount():
        pytest.skip("no folder can be mounted here")
    inside = f'mount -t tmpfs -o size=1m none /dev/shm && {group()} && exec "$@"'
    found = told(["unshare", "-m", "sh", "-c", inside, "sh", *COMMAND], code=1)
    shared = about(found, "shared memory")
    assert shared["level"] == FAILS
    assert "1.0 of 1.0 MiB are free in /dev/shm" in shared["what"]
    assert "docker --shm-size" in shared["cure"]
    cores = about(found, "cores")
    assert cores["level"] == BEWARE
    assert f"may use the time of 1.5 of {os.cpu_count()} cores" in cores["what"]
    assert "CPU workers that a run starts by itself: 1;" in cores["cure"]
    assert found["host"]["cores_limit"] == 1.5


TWO_GPUS = """
class NVMLError(Exception): pass
class NVMLLibraryMismatchError(Exception): pass

class Values:
    def __init__(self, **values): self.__dict__.update(values)

def refuse(*_): raise NVMLError("Not Supported")
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "580.65.06"
def nvmlSystemGetCudaDriverVersion_v2(): return 13000
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index):
    if index == 2: raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetUUID(handle): return ["GPU-aaaa", "GPU-bbbb"][handle]
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(handle): return Values(used=10 << 30, total=141 << 30)
def nvmlDeviceGetUtilizationRates(handle): return Values(gpu=87)
def nvmlDeviceGetMigMode(handle): refuse()
def nvmlDeviceGetComputeMode(handle): return 0
def nvmlDeviceGetNvLinkState(handle, link): return 1 if link < 18 else refuse()
def nvmlDeviceGetComputeRunningProcesses(handle):
    import os
    return [Values(pid=os.getppid(), usedGpuMemory=9 << 30)] if handle == 0 else []
def nvmlDeviceGetP2PStatus(one, other, kind): return 0
def nvmlDeviceGetTopologyCommonAncestor(one, other): return 50
"""


def test_gpus_that_are_idle_because_torch_is_built_without_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this build of torch has CUDA")
    (tmp_path / "pynvml.py").write_text(TWO_GPUS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0")
    assert main(["doctor", "--devices", "cuda", "--workers", "1"]) == 1
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "driver 580.65.06, for CUDA up to 13.0",
        "GPUs physical 0 = GPU-aaaa NVIDIA H200, 10.0 of 141.0 GiB in use, busy 87%, 18 NVLinks",
        "physical 1 = GPU-bbbb NVIDIA H200, 10.0 of 141.0 GiB in use, busy 87%, 18 NVLinks",
        "physical 2: GPU is lost",
        "links 0 - 1: NVLink, direct",
        "visible cuda:0 = physical 1 = GPU-bbbb: torch does not see it",
        "cuda:1 = physical 0 = GPU-aaaa: torch does not see it",
        "environment CUDA_VISIBLE_DEVICES='1, 0'",
    ):
        assert line in lines, text
    assert f"held by process {os.getpid()} (" in text
    flowing = " ".join(text.split())
    assert f"fails cuda: torch sees no GPU: torch {torch.__version__} is built without" in flowing
    assert "beware torch: 2 GPUs are idle" in flowing
    assert "beware GPU 2: the driver lists it and cannot reach it: GPU is lost" in flowing
    assert "works" not in text.splitlines()[-1]


def test_numbers_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--workers", "0"]) == 2
    assert "workers: got 0" in capsys.readouterr().err


# --- questions that are cut off -------------------------------------------------------------------


def asked(folder: Path, text: str, **options: float) -> Any:
    (folder / "ask_this.py").write_text(f"import json, os, time\n\n\ndef run():\n{text}")
    return ask("ask_this", [str(folder)], **options)


def test_a_question_that_blocks_is_cut_off_and_what_was_answered_counts(tmp_path: Path) -> None:
    text = """
    print(json.dumps({"asking": "GPU 0"}), flush=True)
    print(json.dumps({"gpu": os.getpid()}), flush=True)
    print(json.dumps({"asking": "GPU 1"}), flush=True)
    time.sleep(1000)
"""
    began = time.monotonic()
    found = asked(tmp_path, text, answer_s=0.3)
    assert time.monotonic() - began < 5
    assert found.failure == "no answer within 0.3 s from GPU 1"
    assert not psutil.pid_exists(found.first("gpu"))


def test_every_question_has_its_own_time(tmp_path: Path) -> None:
    text = """
    for number in range(4):
        print("a library's own words\\n7", flush=True)
        print(json.dumps({"asking": f"GPU {number}"}), flush=True)
        time.sleep(0.2)
        print(json.dumps({"gpu": number}), flush=True)
    print(json.dumps({"end": True}), flush=True)
    time.sleep(1000)
"""
    found = asked(tmp_path, text, answer_s=0.6)
    assert found == ([{"gpu": number} for number in range(4)], None)


def test_a_process_that_never_begins_or_dies(tmp_path: Path) -> None:
    slow = asked(tmp_path, "    time.sleep(1000)\n", begin_s=0.3)
    assert slow.failure == "no answer within 0.3 s from the start"
    dies = asked(
        tmp_path, '    print(\'{"asking": "GPU 0"}\', flush=True)\n    raise OSError("x")\n'
    )
    assert dies.failure == "asking GPU 0 ended its process: OSError: x"
    told_why = asked(tmp_path, '    print(\'{"error": "no driver"}\', flush=True)\n')
    assert told_why == ([], "no driver")


def test_no_descriptors_to_ask_with(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/dev/fd")) + 1  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        holes = []
        while True:
            try:
                holes.append(os.dup(0))
            except OSError:
                break
        found = asked_without_files(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for hole in holes:
            os.close(hole)
    assert found.failure is not None
    assert found.failure.startswith("no process can be started to ask: Too many open files")


def asked_without_files(folder: Path) -> Any:
    return ask("ask_this", [str(folder)])


TORCH_STAND_IN = """
import contextlib
from types import SimpleNamespace as Values

__version__ = "2.13.0+cu130"
version = Values(cuda="13.0", hip=None)
backends = Values(
    mkldnn=Values(is_available=lambda: True), cudnn=Values(version=lambda: 91002)
)
distributed = Values(
    is_available=lambda: True, is_nccl_available=lambda: True, is_gloo_available=lambda: True
)
accelerator = Values(
    current_accelerator=lambda: Values(type="cuda"),
    device_index=lambda index: contextlib.nullcontext(),
)

def init():
    raise RuntimeError("The NVIDIA driver on your system is too old\\nPlease update")

cuda = Values(
    device_count=lambda: COUNT,
    init=init,
    get_device_properties=lambda index: Values(uuid="aaaa"),
)

class Ones:
    def __mul__(self, factor): return self
    def sum(self): return Values(item=lambda: 16.0)

def get_num_threads(): return 32
def get_device_module(accelerator): return cuda
def ones(size, device):
    if device == "cuda:1":
        raise RuntimeError("no kernel image is available\\nCompile with ...")
    return Ones()
"""


@pytest.mark.parametrize("count", [0, 2])
def test_what_torch_is_asked_where_it_has_gpus(count: int, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"COUNT = {count}\n{TORCH_STAND_IN}")
    found = ask("ask_torch", [str(tmp_path)])
    assert found.failure is None
    assert found.first("build")["nccl"]
    assert found.first("build")["cudnn"] == "91002"
    if count == 0:
        assert found.first("why_none") == "The NVIDIA driver on your system is too old"
        return
    assert found.all("device") == [
        {"device": "cuda:0", "uuid": "aaaa", "error": None},
        {"device": "cuda:1", "uuid": "aaaa", "error": "no kernel image is available"},
    ]


# --- limits and control groups --------------------------------------------------------------------


def test_a_limit_on_files_is_one_on_shared_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        found = limits()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.file_bytes == 1 << 20
    assert found.segment_error is not None
    assert "64 MiB cannot be had (File too large)" in found.segment_error
    assert limits().segment_error is None


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_group_of_version_2_and_those_above_it(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/container\n")
    root = tmp_path / "cgroup"
    written(
        root,
        {
            "pod/cpu.max": "250000 100000\n",
            "pod/container/cpu.max": "max 100000\n",
            "pod/memory.max": "max\n",
            "pod/container/memory.max": f"{8 * GIB}\n",
            "pod/container/memory.current": f"{5 * GIB}\n",
            "pod/container/memory.stat": f"anon 77\ninactive_file {GIB}\n",
        },
    )
    assert control_group.cores(root, membership) == 2.5
    assert control_group.memory_left(root, membership) == 4 * GIB


def test_a_group_of_version_1_in_a_container(tmp_path: Path) -> None:
    # Its name is the machine's, and what is mounted is the group itself.
    membership = tmp_path / "membership"
    membership.write_text(
        "9:name=systemd:/docker/77\n4:memory:/docker/77\n2:cpu,cpuacct:/docker/77\n0::/\n"
    )
    root = tmp_path / "cgroup"
    written(
        root,
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert control_group.cores(root, membership) == 0.5
    assert control_group.memory_left(root, membership) == 0


def test_no_limits(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/\n2:cpu:/\n")
    root = tmp_path / "cgroup"
    written(
        root,
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert control_group.cores(root, membership) is None
    assert control_group.memory_left(root, membership) is None
    assert control_group.cores(root, tmp_path / "nothing") is None


# --- verdicts on made facts -----------------------------------------------------------------------


def gpu(index: int, **changes: Any) -> Gpu:
    values: dict[str, Any] = {
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "memory_bytes": GIB,
        "memory_total_bytes": 141 * GIB,
        "use": 0.0,
        "compute_mode": "shared",
        "nvlinks": 18,
        "is_cut": False,
        "slices": (),
        "holders": (),
    }
    return Gpu(index, **{**values, **changes})


HOST = Host("AMD EPYC", 64, 32, 64, None, 2, 256 * GIB, 200 * GIB, None)
LIMITS = Limits(8 * GIB, 8 * GIB, True, None, 65536, None, None, None, "/tmp", None, 50 * GIB, None)
TORCH = Torch("2.13.0+cu130", "13.0", None, "cuda", 32, True, "91002", True, True, None, None)
VISIBLE = tuple(Visible(index, f"GPU-{index}") for index in range(2))
WELL = Facts(
    environment={},
    driver=Driver("580.65.06", "13.0", None),
    gpus=(gpu(0), gpu(1)),
    lost={},
    links=(Link(0, 1, "NVLink", True),),
    selection=Selection(VISIBLE, None),
    torch=TORCH,
    accelerators=tuple(
        Accelerator(f"cuda:{n}", visible, None) for n, visible in enumerate(VISIBLE)
    ),
    host=HOST,
    limits=LIMITS,
    interfaces=(Interface("eth0", ("10.0.0.2",), 25_000, False),),
)
LAPTOP = replace(
    WELL,
    driver=Driver(None, None, "NVML Shared Library Not Found"),
    gpus=(),
    links=(),
    selection=Selection((), None),
    torch=replace(TORCH, version="2.13.0+cpu", cuda=None, accelerator=None, nccl=False),
    accelerators=(),
)


def the_verdict(facts: Facts, **wanted: Any) -> Verdict:
    (verdict,) = verdicts(facts, Wanted(**wanted))
    return verdict


def test_nothing_is_wrong() -> None:
    assert verdicts(WELL, Wanted()) == verdicts(LAPTOP, Wanted()) == []
    assert verdicts(WELL, Wanted(devices=("cuda:1", "cpu"), workers=4, loader_workers=2)) == []
    text = shown(WELL, [])
    assert text.splitlines()[-1] == "nothing is wrong: a run would work"
    assert "cuda:0 = physical 0 = GPU-0: computes" in text


def host(**changes: Any) -> Facts:
    return replace(LAPTOP, host=replace(HOST, **changes))


def limited(**changes: Any) -> Facts:
    return replace(LAPTOP, limits=replace(LIMITS, **changes))


def hidden(value: str, remark: str | None, *visible: Visible) -> Facts:
    seen = tuple(a for a in WELL.accelerators if a.visible in visible)
    return replace(
        WELL,
        environment={"CUDA_VISIBLE_DEVICES": value},
        selection=Selection(visible, remark),
        accelerators=seen,
    )


def first_gpu(**changes: Any) -> Facts:
    return replace(WELL, gpus=(gpu(0, **changes), gpu(1)))


def built(**changes: Any) -> Facts:
    return replace(WELL, torch=replace(TORCH, **changes), accelerators=())


BUSY = {"memory_bytes": 140 * GIB + 800 * MIB, "holders": (Holder(4242, "python", 140 * GIB),)}

# Facts; what is wanted; level, subject, and parts of what is said, of the cure too.
CASES: dict[str, tuple[Facts, dict[str, Any], str, str, list[str]]] = {
    "hidden by -1": (
        hidden("-1", "'-1' is negative, which hides every GPU"),
        {},
        *(BEWARE, "GPUs", ["='-1': '-1' is negative", "2 are hidden, and a run uses", "unset"]),
    ),
    "one hidden": (
        hidden("1", None, VISIBLE[1]),
        {},
        *(BEWARE, "GPUs", ["='1' hides 1 of 2: physical 0"]),
    ),
    "list ends early": (
        hidden("0,7,1", "entry 2, '7', is none of the 2 GPUs here", VISIBLE[0]),
        {},
        *(BEWARE, "GPUs", ["entry 2, '7'"]),
    ),
    "several kinds": (
        replace(
            hidden("0,1", None, *VISIBLE),
            gpus=(gpu(0), gpu(1, name="NVIDIA T400")),
        ),
        {},
        *(BEWARE, "GPUs", ["of several kinds", "CUDA_DEVICE_ORDER=PCI_BUS_ID"]),
    ),
    "too little shared memory": (
        limited(shm_bytes=MIB, shm_free_bytes=MIB),
        {},
        *(FAILS, "shared memory", ["1.0 of 1.0 MiB are free in /dev/shm", "--shm-size"]),
    ),
    "a container's shared memory": (
        limited(shm_bytes=64 * MIB, shm_free_bytes=64 * MIB),
        {"loader_workers": 2},
        *(BEWARE, "shared memory", ["64.0 of 64.0 MiB"]),
    ),
    "shared memory that cannot be written": (
        limited(shm_is_writable=False),
        {},
        *(FAILS, "shared memory", ["cannot be written to", "1777"]),
    ),
    "no segments": (
        limited(segment_error="shared memory: 64 MiB cannot be had (File too large); use less"),
        {},
        *(FAILS, "shared memory", ["64 MiB cannot be had (File too large)", "--engine towers"]),
    ),
    "few descriptors": (
        limited(files=49, files_most=None),
        {"workers": 8},
        *(
            FAILS,
            "descriptors",
            [
                "may open 49 files",
                "a run needs 50 (4 for each of 8 worker processes)",
                "ulimit -n 4096",
            ],
        ),
    ),
    "descriptors for no loaders": (
        limited(files=200, files_most=200),
        {"workers": 8},
        *(BEWARE, "descriptors", ["200 files", "one more per tensor", "the most is 200"]),
    ),
    "a container's cores": (
        host(cores_limit=1.5),
        {},
        *(BEWARE, "cores", ["may use the time of 1.5 of 64 cores", "starts by itself: 1;"]),
    ),
    "affinity": (
        host(cores_allowed=4),
        {},
        *(BEWARE, "cores", ["may run on 4 of 64 cores", "starts by itself: 4;"]),
    ),
    "too many threads": (
        LAPTOP,
        {"workers": 16, "threads": 8},
        *(BEWARE, "cores", ["16 workers x 8 threads on 64 cores"]),
    ),
    "no memory": (
        host(memory_free_bytes=300 * MIB),
        {"workers": 2},
        *(FAILS, "memory", ["300 MiB are left of the machine", "2 workers take 384 MiB"]),
    ),
    "no memory in the container": (
        host(container_free_bytes=100 * MIB),
        {},
        *(FAILS, "memory", ["100 MiB are left to the container", "8 workers take 768"]),
    ),
    "few addresses": (
        limited(address_bytes=4 * GIB),
        {},
        *(BEWARE, "memory", ["limited to 4,096 MiB (ulimit -v)"]),
    ),
    "temporary folder": (
        limited(temporary="/gone", temporary_error="No such file or directory"),
        {},
        *(FAILS, "temporary folder", ["/gone cannot be written to: No such file", "TMPDIR"]),
    ),
    "a full temporary folder": (
        limited(temporary_free_bytes=MIB),
        {},
        *(BEWARE, "temporary folder", ["1.0 MiB are free in /tmp"]),
    ),
    "a long temporary folder": (
        limited(sockets_error="the temporary folder: got '/tmp/long', expected less; shorten it"),
        {"loader_workers": 1},
        *(FAILS, "temporary folder", ["got '/tmp/long', expected less", "TMPDIR"]),
    ),
    "no torch": (
        built(version=None, failure="ImportError: libtorch.so"),
        {"devices": ("cpu",)},
        *(FAILS, "torch", ["cannot be imported: ImportError: libtorch.so"]),
    ),
    "torch hangs": (
        replace(WELL, torch=replace(TORCH, failure="no answer within 5 s from cuda:1 to compute")),
        {},
        *(FAILS, "torch", ["no answer within 5 s from cuda:1", "dmesg"]),
    ),
    "torch hangs, and the device is not needed": (
        replace(WELL, torch=replace(TORCH, failure="no answer within 5 s from cuda:1 to compute")),
        {"devices": ("cpu",)},
        *(BEWARE, "torch", ["no answer within 5 s from cuda:1"]),
    ),
    "the driver hangs": (
        replace(WELL, driver=Driver(None, None, "no answer within 5 s from the NVIDIA driver")),
        {},
        *(FAILS, "driver", ["would hang too", "nvidia-smi -pm 1"]),
    ),
    "the driver hangs, and is not needed": (
        replace(WELL, driver=Driver(None, None, "no answer within 5 s from GPU 0")),
        {"devices": ("cpu",)},
        *(BEWARE, "driver", ["no answer within 5 s from GPU 0"]),
    ),
    "no driver": (
        replace(LAPTOP, torch=TORCH),
        {},
        *(BEWARE, "driver", ["built with CUDA 13.0, and there is no driver", "--gpus all"]),
    ),
    "idle GPUs": (
        built(version="2.13.0+cpu", cuda=None),
        {},
        *(BEWARE, "torch", ["2 GPUs are idle", "without CUDA", "CUDA 13.0 or older"]),
    ),
    "a lost GPU": (
        replace(WELL, lost={2: "GPU is lost"}),
        {},
        *(BEWARE, "GPU 2", ["cannot reach it: GPU is lost", "reset"]),
    ),
    "no such GPU": (
        WELL,
        {"devices": ("cuda:5",)},
        *(FAILS, "cuda:5", ["there are cuda:0 to cuda:1"]),
    ),
    "no such device": (
        LAPTOP,
        {"devices": ("mps",)},
        *(FAILS, "mps", ["torch 2.13.0+cpu sees no such device here"]),
    ),
    "no GPU, by the build": (
        LAPTOP,
        {"devices": ("cuda",)},
        *(FAILS, "cuda", ["torch 2.13.0+cpu is built without CUDA", "NVML Shared Library"]),
    ),
    "no GPU, by an old driver": (
        built(why_none="The NVIDIA driver on your system is too old"),
        {"devices": ("cuda",)},
        *(FAILS, "cuda", ["torch says: The NVIDIA driver on your system is too old"]),
    ),
    "a GPU that does not compute": (
        replace(WELL, accelerators=(Accelerator("cuda:0", VISIBLE[0], "no kernel image"),)),
        {},
        *(FAILS, "cuda:0", ["torch cannot compute on it: no kernel image"]),
    ),
    "a full GPU": (
        first_gpu(**BUSY),
        {},
        *(FAILS, "cuda:0", ["224 of 144,384 MiB are free; held by process 4242 (python) 143,360"]),
    ),
    "a half full GPU": (
        first_gpu(memory_bytes=80 * GIB),
        {},
        *(BEWARE, "cuda:0", ["held by processes that cannot be seen", "--memory-fraction"]),
    ),
    "a prohibited GPU": (
        first_gpu(compute_mode="prohibited"),
        {},
        *(FAILS, "cuda:0", ["prohibited", "nvidia-smi -i 0 -c DEFAULT"]),
    ),
    "an exclusive GPU": (
        first_gpu(compute_mode="exclusive", holders=(Holder(7, None, None),)),
        {},
        *(FAILS, "cuda:0", ["lets one process use it, and 1 do"]),
    ),
    "GPUs without a link": (
        replace(WELL, links=(Link(0, 1, "two NUMA nodes", False),)),
        {},
        *(BEWARE, "GPUs 0, 1", ["neither reads the other's memory (two NUMA nodes)"]),
    ),
    "an interface that is not there": (
        replace(WELL, environment={"NCCL_SOCKET_IFNAME": "ib0"}),
        {},
        *(BEWARE, "interfaces", ["NCCL_SOCKET_IFNAME='ib0' fits none that is up (eth0)"]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_found_and_what_helps(case: str) -> None:
    facts, wanted, level, subject, parts = CASES[case]
    verdict = the_verdict(facts, **wanted)
    assert verdict[:2] == (level, subject), verdict
    said = f"{verdict.what}; {verdict.cure}"
    assert all(part in said for part in parts), said
    text = shown(facts, [verdict])
    assert f"{level:7} {subject}: " in text
    assert ("a run would work" in text) == (level == BEWARE)
    assert max(map(len, text.split("\n\n")[-1].splitlines())) <= 100


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (limited(shm_bytes=MIB, shm_free_bytes=MIB), {"loader_workers": 0}),
        (limited(shm_bytes=None, shm_free_bytes=None), {}),  # another system than Linux
        (limited(files=None), {"workers": 8}),
        (limited(files=256), {"workers": 32, "threads": 1}),
        (limited(sockets_error="it is long"), {"loader_workers": 0}),
        (first_gpu(**BUSY), {"devices": ("cpu",)}),  # what is not used may be full
        (first_gpu(compute_mode="prohibited"), {"devices": ("cuda:1",)}),
        (replace(WELL, environment={"GLOO_SOCKET_IFNAME": "eth"}), {}),
        (replace(WELL, environment={"NCCL_SOCKET_IFNAME": "^docker"}), {}),
        (replace(WELL, links=(Link(0, 1, "", False),)), {"devices": ("cuda:1",)}),
        (host(cores_limit=64.0), {}),
        (replace(LAPTOP, environment={"CUDA_VISIBLE_DEVICES": "0"}), {}),  # there is no driver
    ],
)
def test_what_does_not_matter(facts: Facts, wanted: dict[str, Any]) -> None:
    assert verdicts(facts, Wanted(**wanted)) == []


def test_what_fails_comes_first() -> None:
    facts = replace(host(cores_allowed=4), limits=replace(LIMITS, files=16))
    assert [verdict.level for verdict in verdicts(facts, Wanted())] == [FAILS, BEWARE]
