"""Devices by name, their memory, and who they are; GPUs by stand-ins where there are none."""

from __future__ import annotations

import os
import resource
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.messages import expect_error

from quorate.errors import SettingError, UserError
from quorate.machine import container, devices, out_of_memory
from quorate.machine import cores as cores_of
from quorate.machine.cores import usable_cores
from quorate.machine.descriptors import require_for_workers
from quorate.machine.devices import worker_devices
from quorate.machine.gpu_identity import mapping
from quorate.machine.memory_fraction import bound_memory, checked_fraction, fraction_remark

MIB = 1 << 20
CPU, CUDA_0, CUDA_1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


# --- names ----------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("names", "workers", "found"),
    [
        ("cuda", None, ["cuda:0", "cuda:1"]),
        ("cuda:1", None, ["cuda:1"]),
        ("cuda:1, cuda:0", None, ["cuda:1", "cuda:0"]),
        ("cuda:0,cpu", 3, ["cuda:0", "cpu", "cuda:0"]),
        ("cuda:1", 3, ["cuda:1"] * 3),  # several workers on one device
        ("cuda:0+cuda:1", None, ["cuda:0+cuda:1"]),  # one replica over two
        ("cuda:1 + cuda:0, cpu", 3, ["cuda:1+cuda:0", "cpu", "cuda:1+cuda:0"]),
        (["cuda"], 4, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        # TensorFlow's
        ("gpu", None, ["cuda:0", "cuda:1"]),
        ("/device:GPU", None, ["cuda:0", "cuda:1"]),
        ("gpu:0", None, ["cuda:0"]),
        ("/gpu:0,/device:GPU:1", None, ["cuda:0", "cuda:1"]),
        ("GPU:1+gpu:0", None, ["cuda:1+cuda:0"]),
        ("/cpu:0, /device:CPU:0", None, ["cpu", "cpu"]),
    ],
)
def test_names(names: Any, workers: int | None, found: list[str], two_gpus: None) -> None:
    assert [str(device) for device in worker_devices(names, workers)] == found


@pytest.mark.parametrize(
    "name",
    [
        "gpu:2",
        "/device:GPU:2",
        "gpus:0",
        "/job:worker/gpu:0",
        "gpu+cuda:0",
        "/cpu:1",
        "cpu:256",
        "cuda:256",
        "cuda:128",
        f"cuda:{10**30}",
    ],
)
def test_names_that_are_refused(name: str, two_gpus: None) -> None:
    with expect_error(SettingError, name="devices", got=name):
        worker_devices(name, None)


def test_other_accelerators_are_devices_like_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert [str(group) for group in worker_devices("mps", 2)] == ["mps:0", "mps:0"]
    with expect_error(SettingError, name="devices", got="mps:1"):
        worker_devices("mps:1", None)


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_devices_that_are_not_there(name: str) -> None:
    if name != "meta" and torch.get_device_module(name).device_count():
        pytest.skip("it is there")
    with expect_error(SettingError, name="devices", got=name):
        worker_devices(name, None)


@pytest.mark.parametrize(
    ("build", "value", "driver", "reasons", "not_said"),
    [
        (None, None, True, ["it is built without CUDA"], "driver"),
        ("13.0", "", True, ["CUDA_VISIBLE_DEVICES='': it is empty, which hides"], "driver"),
        ("13.0", "-1", True, ["CUDA_VISIBLE_DEVICES='-1': '-1' is negative"], "built"),
        ("13.0", "0,0", True, ["'0' is there twice, which hides every GPU"], "built"),
        ("13.0", "0", False, ["no NVIDIA driver is loaded"], "hides"),
        ("13.0", "0", True, ["no reason is known"], "driver"),
        (None, "-1", False, ["built without CUDA; CUDA_VIS", "; no NVIDIA driver"], "reason"),
    ],
)
def test_why_there_is_no_gpu(
    build: str | None,
    value: str | None,
    driver: bool,
    reasons: list[str],
    not_said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(devices, "DRIVER", SimpleNamespace(exists=lambda: driver))
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(SettingError) as error:
        worker_devices("cuda", None)
    said = str(error.value)
    assert "sees no cuda device here: " in said
    assert said.endswith("; see quorate doctor")
    assert all(reason in said for reason in reasons), said
    assert not_said not in said


@pytest.mark.parametrize(("limit", "cores"), [(None, 6), (2.5, 2), (0.3, 1), (64.0, 6)])
def test_cores_of_a_container(
    limit: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores_of.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(container, "cores", lambda: limit)
    cores_of._container_cores.cache_clear()
    try:
        assert usable_cores() == cores
        assert len(worker_devices("cpu", None)) == 1
    finally:
        cores_of._container_cores.cache_clear()


# --- descriptors ----------------------------------------------------------------------------------


def test_too_few_descriptors_are_refused_with_both_figures() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    require_for_workers(2)
    opened = len(os.listdir("/dev/fd")) - 1  # noqa: PTH208
    for left, is_enough in ((21, False), (22, True)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + left, hard))
        try:
            require_for_workers(2)
        except UserError as error:
            said = str(error)
            assert not is_enough
        else:
            assert is_enough
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert said.startswith(f"descriptors: 2 workers need 22, and 21 of {opened + 21} are left (")
    assert "ulimit -n 256" in said


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "given"),
    [
        (0, [CUDA_0]),
        (1.2, [CPU]),
        (True, [CUDA_0]),
        ("0.7", [CUDA_0]),
        (0.7, [CUDA_0] * 2),
        (0.4, [CUDA_1, CUDA_0, CUDA_0, CUDA_0]),
    ],
)
def test_fractions_that_cannot_be(fraction: Any, given: list[torch.device]) -> None:
    with expect_error(SettingError, name="memory_fraction", got=fraction):
        checked_fraction(fraction, given)


def test_fractions_that_can() -> None:
    assert checked_fraction(None, [CUDA_0] * 9) is None
    assert checked_fraction(1, [CUDA_0, CUDA_1]) == 1.0
    assert checked_fraction(0.25, [CUDA_0] * 4) == 0.25
    assert checked_fraction(0.7, [CPU, CPU]) == 0.7
    assert fraction_remark([CUDA_0], 0.7) == fraction_remark([CPU], None) == []
    (said,) = fraction_remark([CPU, CUDA_0, CPU], 0.7)
    assert said.startswith("memory_fraction=0.7 has no effect on cpu: ")


def test_a_process_is_bounded_by_what_its_workers_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds: list[Any] = []
    name = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, name, lambda *given: bounds.append(given))
    monkeypatch.setattr(torch.mps, name, lambda *given: bounds.append(given))
    bound_memory([CUDA_0, CUDA_1, CUDA_0, CPU], 0.25)
    bound_memory([torch.device("mps:0")], 0.25)
    bound_memory([CUDA_0], None)
    assert bounds == [(0.5, CUDA_0), (0.25, CUDA_1), (0.25,)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_holds_the_bound_and_who_holds_what_is_said() -> None:
    _, total = torch.cuda.mem_get_info(0)
    bound_memory([CUDA_0], 0.05)
    try:
        torch.empty(int(0.03 * total), dtype=torch.uint8, device="cuda:0")
        with pytest.raises(torch.OutOfMemoryError) as error:
            torch.empty(int(0.06 * total), dtype=torch.uint8, device="cuda:0")
        said = out_of_memory.note(error.value, CUDA_0, shards=4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        torch.cuda.empty_cache()
    assert said is not None
    assert "(memory_fraction)" in said
    assert "a larger memory_fraction; more shards than 4" in said


class StandIn:
    """NVML on a machine with one GPU, on which this process and others compute."""

    class NVMLError(Exception):
        pass

    class NVMLLibraryMismatchError(Exception):
        pass

    users = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-aaaa":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetIndex(self, handle: str) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        own, init = psutil.Process().pid, 1
        sizes = {own: 9000 * MIB, init: 20_000 * MIB, 2**22 + 7: None}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in sizes.items()]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    uuids = ["aaaa", "bbbb"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i])
    )
    return stand_in


def test_which_gpu_is_which(nvml: StandIn) -> None:
    assert mapping([CPU, CPU]) == []
    # Of the second one the driver knows nothing.
    assert mapping([CUDA_0, CUDA_1, CUDA_0, CPU]) == ["cuda:0 = physical 4 = GPU-aaaa"]
    assert nvml.users == 0


def test_out_of_memory_on_a_gpu(nvml: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (120 * MIB, 40_000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 8000 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 8500 * MIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.25)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    said = out_of_memory.note(error, CUDA_0, shards=4, parameter_bytes=13 * MIB)
    assert said is not None
    (name,) = [psutil.Process(1).name()]
    for part in (
        "quorate: out of memory on cuda:0: 120 MiB free of 40,000 MiB, ",
        "this process has 8,000 MiB in tensors, 500 MiB kept by torch for later ones, ",
        "and may have 10,000 MiB (memory_fraction), ",
        "parameters and gradients are 26 MiB, the rest is the shard's rows and activations",
        f"process 1 ({name}) has 20,000 MiB, ",
        "process 4194311 has an unknown amount. ",
        "What helps: a larger memory_fraction; more shards than 4 (each is smaller); ",
        "precision='bf16'; fewer workers on this device",
    ):
        assert part in said
    assert "9,000" not in said  # of this process, torch knows it better


def test_other_errors_are_not_about_memory() -> None:
    assert out_of_memory.note(RuntimeError("shape"), CPU) is None
    assert out_of_memory.note(ValueError("DefaultCPUAllocator"), CPU) is None
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        said = out_of_memory.note(error, CPU)
    assert said is not None
    assert "MiB free, this process has" in said
    assert "What helps: more shards (each is smaller); " in said
    assert said.endswith("fewer workers")
