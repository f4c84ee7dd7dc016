"""The findings of a doctor: plain values, the basis of the verdicts."""

from __future__ import annotations

from dataclasses import dataclass

from quorate.machine.host import Host
from quorate.machine.visible_devices import Selection, Slice, VisibleGpu


@dataclass(frozen=True)
class Holder:
    """A process that holds memory on a GPU."""

    pid: int
    name: str | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU known to the driver, visible or not."""

    index: int  # nvidia-smi's
    uuid: str
    name: str | None
    memory_bytes: int | None  # in use by all processes
    memory_total_bytes: int | None
    use: float | None  # share of time with a kernel, 0 to 1
    compute_mode: str | None  # "shared", "exclusive", "prohibited"
    nvlinks: int  # number of active links
    is_cut: bool  # MIG is on
    slices: tuple[Slice, ...]
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class Link:
    """The link between two GPUs."""

    one: int
    other: int
    kind: str  # "NVLink", "one PCIe switch", ...
    is_direct: bool | None  # whether each can read the other's memory


@dataclass(frozen=True)
class Driver:
    """The state of NVIDIA's driver."""

    version: str | None
    cuda: str | None  # the newest supported CUDA
    failure: str | None  # why no more is known


@dataclass(frozen=True)
class Accelerator:
    """A device visible to torch."""

    device: str  # "cuda:0"
    visible: VisibleGpu | None  # the GPU behind the device
    error: str | None  # why the device does not compute


@dataclass(frozen=True)
class Torch:
    """The build of torch."""

    version: str | None
    cuda: str | None  # used for the build
    hip: str | None
    accelerator: str | None  # "cuda", "mps", "xpu", ...
    threads: int | None  # default number of intra-op threads
    mkldnn: bool
    cudnn: str | None
    nccl: bool
    gloo: bool
    why_none: str | None  # torch's own words, if torch sees no device
    failure: str | None


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of the system for a process."""

    segment_error: str | None  # why workers cannot have shared memory
    files: int | None  # descriptors, soft limit; None: no limit
    files_most: int | None  # hard limit: the user may raise the soft limit so far
    file_bytes: int | None  # RLIMIT_FSIZE; None: no limit
    address_bytes: int | None  # RLIMIT_AS; None: no limit
    temporary: str
    temporary_error: str | None  # why the folder is not writable
    temporary_free_bytes: int | None


@dataclass(frozen=True)
class NetworkInterface:
    """An active network interface."""

    name: str
    addresses: tuple[str, ...]
    mbit_per_s: int | None
    is_loopback: bool


@dataclass(frozen=True)
class Facts:
    """All findings of a doctor."""

    environment: dict[str, str]  # the variables that devices and threads depend on
    driver: Driver
    gpus: tuple[Gpu, ...]
    lost: dict[int, str]  # GPUs that do not answer, and the driver's error
    links: tuple[Link, ...]
    selection: Selection  # the GPUs selected by CUDA_VISIBLE_DEVICES
    torch: Torch
    accelerators: tuple[Accelerator, ...]
    host: Host
    limits: ProcessLimits
    interfaces: tuple[NetworkInterface, ...]
