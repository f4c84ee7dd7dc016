"""The command ``doctor``, under real limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quorate.commands.doctor.verdict import BEWARE, FAILS
from quorate.commands.main import main
from quorate.machine import container

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="control groups")


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


def first(folder: Path) -> str:
    """A path for modules on which a folder comes before all that is on it already."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def about(found: dict[str, Any], subject: str) -> dict[str, Any]:
    (verdict,) = [v for v in found["verdicts"] if v["subject"] == subject]
    return dict(verdict)


def asking(module: str) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if module in (process.info["cmdline"] or [])
    ]


@pytest.mark.slow
@LINUX
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is all there is")
def test_few_descriptors_one_core_hidden_gpus_and_a_driver_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(HANGS)
    found = told(
        [sys.executable, "-c", LIMITED, *COMMAND, "--workers", "8"],
        code=1,
        CUDA_VISIBLE_DEVICES="-1",
        PYTHONPATH=first(tmp_path),
    )
    assert not found["works"]
    files = about(found, "descriptors")
    assert files["level"] == FAILS
    assert (
        "may open 40 files (ulimit -n), and a run needs 59 (4 for each of 8 worker processes)"
        in files["what"]
    )
    assert files["cure"]
    (cores, waiting) = [v for v in found["verdicts"] if v["subject"] == "cores"]
    assert f"may run on 1 of {os.cpu_count()} cores (affinity" in cores["what"]
    assert "8 workers x 1 thread on 1 core" in waiting["what"]
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
    version_1, version_2 = container.ROOT / "cpu", container.ROOT / "cgroup.controllers"
    parent = version_1 if (version_1 / "cpu.cfs_quota_us").exists() else container.ROOT
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
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # its processes are gone, and the kernel may not know yet
        try:
            name.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            break


@pytest.mark.slow
@LINUX
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is all there is")
def test_a_container_with_few_cores(group: Callable[[], str]) -> None:
    found = told(["sh", "-c", f'{group()} && exec "$@"', "sh", *COMMAND], code=0)
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


@pytest.mark.parametrize(
    "error", ["ImportError('libcudart.so.13: cannot open')", "OSError('[WinError 126] c10.dll')"]
)
def test_a_torch_that_cannot_be_imported_is_explained(error: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}\n")
    found = told([*COMMAND, "--devices", "mps"], code=1, PYTHONPATH=first(tmp_path))
    torch = about(found, "torch")
    kind, _, text = error.partition("('")
    assert torch["level"] == FAILS
    assert torch["what"] == f"it cannot be imported: {kind}: {text[:-2]}"
    assert torch["cure"] == "install it again: pip install torch"
    # Of devices nothing is known then, and nothing is said.
    assert "mps" not in {verdict["subject"] for verdict in found["verdicts"]}


def test_the_doctor_does_not_import_torch_itself() -> None:
    check = (
        "import sys; from quorate.commands.main import main; main(['doctor', '--json']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_numbers_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--workers", "0"]) == 2
    assert "workers: got 0" in capsys.readouterr().err
