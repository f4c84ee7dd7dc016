"""What a doctor found: plain values, from which verdicts follow."""

from __future__ import annotations

from dataclasses import dataclass

from quorate.machine.host import Host
from quorate.machine.visible_devices import Selection, Slice, Visible


@dataclass(frozen=True)
class Holder:
    """A process that has memory on a GPU."""

    pid: int
    name: str | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver knows, visible or not."""

    index: int  # nvidia-smi's
    uuid: str
    name: str | None
    memory_bytes: int | None  # in use, by anyone
    memory_total_bytes: int | None
    use: float | None  # share of time with a kernel, 0 to 1
    compute_mode: str | None  # "shared", "exclusive", "prohibited"
    nvlinks: int  # that are up
    is_cut: bool  # MIG is on
    slices: tuple[Slice, ...]
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class Link:
    """What two GPUs have between them."""

    one: int
    other: int
    kind: str  # "NVLink", "one PCIe switch", ...
    is_direct: bool | None  # whether one reads the other's memory


@dataclass(frozen=True)
class Driver:
    """What there is of NVIDIA's driver."""

    version: str | None
    cuda: str | None  # the newest CUDA that it can run
    failure: str | None  # why no more is known


@dataclass(frozen=True)
class Accelerator:
    """A device that torch sees."""

    device: str  # "cuda:0"
    visible: Visible | None  # which GPU it is
    error: str | None  # why it does not compute


@dataclass(frozen=True)
class Torch:
    """torch's build."""

    version: str | None
    cuda: str | None  # that it was built with
    hip: str | None
    accelerator: str | None  # "cuda", "mps", "xpu", ...
    threads: int | None  # intra-op threads, by default
    mkldnn: bool
    cudnn: str | None
    nccl: bool
    gloo: bool
    why_none: str | None  # torch's own words, if it sees none of its devices
    failure: str | None


@dataclass(frozen=True)
class Limits:
    """What the system lets a process have."""

    segment_error: str | None  # why workers' shared memory cannot be had
    files: int | None  # descriptors, soft limit; None: no limit
    files_most: int | None  # hard limit: what the user may raise it to
    file_bytes: int | None  # RLIMIT_FSIZE; None: no limit
    address_bytes: int | None  # RLIMIT_AS; None: no limit
    temporary: str
    temporary_error: str | None  # why nothing can be written there
    temporary_free_bytes: int | None


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    addresses: tuple[str, ...]
    mbit_per_s: int | None
    is_loopback: bool


@dataclass(frozen=True)
class Facts:
    """All that a doctor found."""

    environment: dict[str, str]  # the variables that devices and threads depend on
    driver: Driver
    gpus: tuple[Gpu, ...]
    lost: dict[int, str]  # GPUs that do not answer, and what the driver says
    links: tuple[Link, ...]
    selection: Selection  # what CUDA_VISIBLE_DEVICES leaves of them
    torch: Torch
    accelerators: tuple[Accelerator, ...]
    host: Host
    limits: Limits
    interfaces: tuple[Interface, ...]
