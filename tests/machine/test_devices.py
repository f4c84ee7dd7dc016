"""Devices by name, their memory, and who they are; GPUs by stand-ins where there are none."""

import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.messages import expect_error
from support.nvml import Nvml

from quorate.errors import SettingError
from quorate.machine import devices, out_of_memory, resources
from quorate.machine.devices import worker_devices
from quorate.machine.gpu_identity import mapping
from quorate.machine.memory_fraction import bound_memory, checked_fraction, fraction_remark
from quorate.machine.resources import usable_cores
from quorate.machine.visible_devices import Gpu, Selection, Slice, VisibleGpu, select, why_none

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
        ("cuda:1, cuda:0", None, ["cuda:1", "cuda:0"]),
        ("cuda:0,cpu", 3, ["cuda:0", "cpu", "cuda:0"]),
        ("cuda:1", 3, ["cuda:1"] * 3),  # several workers on one device
        ("cuda:0+cuda:1", None, ["cuda:0+cuda:1"]),  # one replica over two
        ("cuda:1 + cuda:0, cpu", 3, ["cuda:1+cuda:0", "cpu", "cuda:1+cuda:0"]),
        # TensorFlow's
        ("gpu", None, ["cuda:0", "cuda:1"]),
        ("/gpu:0,/device:GPU:1", None, ["cuda:0", "cuda:1"]),
        ("/cpu:0, /device:CPU:0", None, ["cpu", "cpu"]),
    ],
)
def test_names(names: Any, workers: int | None, found: list[str], two_gpus: None) -> None:
    assert [str(device) for device in worker_devices(names, workers)] == found


@pytest.mark.parametrize(
    "name",
    [
        *("gpu:2", "gpus:0", "/job:worker/gpu:0", "gpu+cuda:0", "/cpu:1"),
        *("cpu:256", "cuda:128", f"cuda:{10**30}"),
    ],
)
def test_names_that_are_refused(name: str, two_gpus: None) -> None:
    with expect_error(SettingError, name="devices", got=name):
        worker_devices(name, None)


def test_a_device_that_is_not_there() -> None:
    with expect_error(SettingError, name="devices", got="meta"):
        worker_devices("meta", None)


@pytest.mark.parametrize(
    ("build", "value", "driver", "reasons", "not_said"),
    [
        (None, None, True, ["it is built without CUDA"], "driver"),
        ("13.0", "", True, ["CUDA_VISIBLE_DEVICES='': it is empty, which hides"], "driver"),
        ("13.0", "-1", True, ["CUDA_VISIBLE_DEVICES='-1': '-1' is negative"], "built"),
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
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(resources, "container_cores", lambda: limit)
    resources._cores_limit.cache_clear()
    try:
        assert usable_cores() == cores
        assert len(worker_devices("cpu", None)) == 1
    finally:
        resources._cores_limit.cache_clear()


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


def test_a_process_is_bounded_by_what_its_workers_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[Any] = []
    name = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, name, lambda *given: bounds.append(given))
    monkeypatch.setattr(torch.mps, name, lambda *given: bounds.append(given))
    bound_memory([CUDA_0, CUDA_1, CUDA_0, CPU], 0.25)
    bound_memory([torch.device("mps:0")], 0.25)
    bound_memory([CUDA_0], None)
    assert bounds == [(0.5, CUDA_0), (0.25, CUDA_1), (0.25,)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    uuids = ["bbbb", "dddd"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i])
    )
    return made


def test_which_gpu_is_which(nvml: Nvml) -> None:
    assert mapping([CPU, CPU]) == []
    # The driver knows nothing of the second GPU.
    assert mapping([CUDA_0, CUDA_1, CUDA_0, CPU]) == ["cuda:0 = physical 1 = GPU-bbbb"]
    assert nvml.users == 0


def test_out_of_memory_on_a_gpu(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (120 * MIB, 40_000 * MIB))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 8000 * MIB)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 8500 * MIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.25)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    said = out_of_memory.note(error, CUDA_0, shards=4, parameter_bytes=13 * MIB)
    assert said is not None
    parent = psutil.Process().parent()
    assert parent is not None
    for part in (
        "quorate: out of memory on cuda:0: 120 MiB free of 40,000 MiB, ",
        "this process has 8,000 MiB in tensors, 500 MiB kept by torch for later ones, ",
        "and may have 10,000 MiB (memory_fraction), ",
        "parameters and gradients are 26 MiB, the rest is the shard's rows and activations",
        f"process {parent.pid} ({parent.name()}) has 20,000 MiB, ",
        "process 4194311 has an unknown amount. ",
        "What helps: a larger memory_fraction; more shards than 4 (each is smaller); ",
        "precision='bf16'; fewer workers on this device",
    ):
        assert part in said
    assert "9,000" not in said  # memory of this process: torch knows better


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


# --- CUDA_VISIBLE_DEVICES: rules of CUDA, case by case --------------------------------------------

A, B, C, D = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932a0ff-0000-4106-c12f-20bd9faed9f6",
    "GPU-11111111-2222-3333-4444-555555555555",
    "GPU-22222222-2222-3333-4444-555555555555",
)
FOUR = [Gpu(index, uuid) for index, uuid in enumerate([A, B, C, D])]

# The variable -> the GPUs as cuda:0, cuda:1, ..., and a part of the remark on hidden GPUs.
CASES: list[tuple[str | None, list[int], str | None]] = [
    (None, [0, 1, 2, 3], None),
    ("", [], "it is empty, which hides every GPU"),
    ("2,1", [2, 1], None),  # the programming guide's example: 2 comes before 1, 0 is hidden
    ("0,2,-1,1", [0, 2], "entry 3, '-1', is negative"),  # likewise: 1 comes after an invalid entry
    ("0, 1, 2, 3", [0, 1, 2, 3], None),  # as in TF1 scripts
    ("-1", [], "'-1' is negative, which hides every GPU"),
    ("1,7,2", [1], "entry 2, '7', is none of the 4 GPUs here"),
    ("0,0", [], "'0' is there twice"),
    ("0,,1", [0], "entry 2, '', is no index"),
    ("NoDevFiles", [], "is no index"),  # as old SLURMs write
    ("1gpu,2ampere", [1, 2], None),  # as C reads numbers
    (f"{D},{A}", [3, 0], None),
    ("GPU-8932f937", [0], None),  # the programming guide's example of an abbreviation
    ("GPU-1,GPU-8932,GPU-2", [2], "entry 2, 'GPU-8932', fits 2 GPUs"),
    ("GPU-77", [], "is none of the 4 GPUs here"),
    (f"GPU-1,{C}", [], "is there twice"),  # two names of the same GPU
    ("GPU-1, GPU-2", [2], "entry 2, ' GPU-2', has a blank before it"),
    ("GPU-1,0", [2], "entry 2, '0', does not begin with GPU-"),
    ("0,GPU-1", [0], "entry 2, 'GPU-1', is no index"),
    ("MIG-11111111", [], "is none of the slices here"),
]


EVER = ("", "-1", "0,0", "NoDevFiles")


@pytest.mark.parametrize(("value", "indices", "remark"), CASES, ids=[repr(c[0]) for c in CASES])
def test_what_is_visible(value: str | None, indices: list[int], remark: str | None) -> None:
    found = select(value, FOUR)
    # If every GPU is hidden whatever there is, the remark comes without a look at GPUs.
    assert why_none(value) == (found.remark if value in EVER else None)
    assert [visible.index for visible in found.visible] == indices
    assert [visible.uuid for visible in found.visible] == [FOUR[i].uuid for i in indices]
    if remark is None:
        assert found.remark is None
    else:
        assert found.remark is not None
        assert remark in found.remark


FIRST, SECOND = Slice("MIG-aaaa", 1, 0), Slice("MIG-bbbb", 2, 0)
CUT = [Gpu(0, A), Gpu(1, C, is_cut=True, slices=(FIRST, SECOND)), Gpu(2, D, is_cut=True)]


@pytest.mark.parametrize(
    ("value", "visible", "remark"),
    [
        ("MIG-bbbb", [VisibleGpu(1, "MIG-bbbb")], None),
        (f"MIG-{C}/1/0", [VisibleGpu(1, "MIG-aaaa")], None),  # the form before driver R470
        ("MIG-bbbb,MIG-aaaa", [VisibleGpu(1, "MIG-bbbb")], "a process sees one slice"),
        ("MIG-cccc", [], "is none of the slices here"),
        ("MIG-bbbb,0", [VisibleGpu(1, "MIG-bbbb")], "does not begin with MIG-"),
        # A GPU cut into slices stands for the first slice, and beside a slice no GPU is seen.
        ("1", [VisibleGpu(1, "MIG-aaaa")], "GPU 1 is cut into slices"),
        (None, [VisibleGpu(1, "MIG-aaaa")], "GPU 1 is cut into slices"),
        ("0", [VisibleGpu(0, A)], None),
        ("0,2", [VisibleGpu(0, A)], "GPU 2 is to be cut into slices (MIG), and has none"),
    ],
)
def test_slices(value: str | None, visible: list[VisibleGpu], remark: str | None) -> None:
    found = select(value, CUT)
    assert list(found.visible) == visible
    assert (found.remark is None) == (remark is None)
    assert (remark or "") in (found.remark or "")


def test_no_gpu() -> None:
    assert select(None, []) == Selection((), None)
    assert select("0", []).remark == "'0' is none of the 0 GPUs here, which hides every GPU"
