"""The doctor's verdicts, on made facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quorate.commands.doctor.facts import (
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
from quorate.commands.doctor.table import shown
from quorate.commands.doctor.verdict import BEWARE, FAILS, Verdict
from quorate.commands.doctor.verdicts import verdicts
from quorate.commands.doctor.wanted import Wanted, named_devices
from quorate.machine.visible_devices import Selection, Visible

GIB, MIB = 1 << 30, 1 << 20


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
LIMITS = Limits(None, 65536, None, None, None, "/tmp", None, 50 * GIB)
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
    assert verdicts(WELL, Wanted(devices=("cuda:1", "cpu"), workers=4)) == []
    text = shown(WELL, [])
    assert text.splitlines()[0] == "a run would work here: nothing is wrong"
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
                "a run needs 59 (4 for each of 8 worker processes)",
                "ulimit -n 4096",
            ],
        ),
    ),
    "descriptors that the user cannot raise": (
        limited(files=256, files_most=256),
        {"workers": 62},
        *(FAILS, "descriptors", ["256 files", "needs 275", "the most is 256: raise it in"]),
    ),
    "no /proc": (
        host(memory_bytes=None, memory_free_bytes=None),
        {},
        *(FAILS, "memory", ["/proc is not there", "mount -t proc"]),
    ),
    "descriptors for no script's own": (
        limited(files=200, files_most=200),
        {"workers": 8},
        *(BEWARE, "descriptors", ["200 files", "may open some itself", "the most is 200"]),
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
        *(
            FAILS,
            "memory",
            ["300 MiB are left of the machine", "a run with 2 workers takes 384 MiB"],
        ),
    ),
    "no memory in the container": (
        host(container_free_bytes=100 * MIB),
        {},
        *(FAILS, "memory", ["100 MiB are left to the container", "a run with 8 workers takes 768"]),
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
        (limited(files=None), {"workers": 8}),
        (limited(files=256), {"workers": 32, "threads": 1}),
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


def test_devices_are_named_as_a_run_takes_them() -> None:
    assert named_devices("cuda:0+cuda:1, cpu") == ("cuda:0", "cuda:1", "cpu")
    assert named_devices("gpu:1,/device:GPU:0") == ("cuda:1", "cuda:0")
