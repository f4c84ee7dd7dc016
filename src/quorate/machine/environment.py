"""The environment: read here and nowhere else, and never written, but for two variables.

And by a process that is forked for somebody: it takes what that one has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

READ_BY_ITEM, READ_BY_CALL = "environ", "getenv"  # of ``os``: code that reads names one of them

DEVICE_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY"),
    *("CUBLAS_WORKSPACE_CONFIG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TMPDIR"),
)

KERNEL_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
)


def kernel_environment() -> dict[str, str]:
    """Return the variables that are set and that choose a processor's kernels."""
    return {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ}


def device_environment() -> dict[str, str]:
    """Return the variables that are set and that devices, threads and interfaces depend on."""
    return {name: os.environ[name] for name in DEVICE_VARIABLES if name in os.environ}


def set_device_variable(name: str, value: str) -> None:
    """Set a variable for libraries of this process that read it later, and for its children."""
    os.environ[name] = value


MALLOC_VARIABLES = (
    *("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"),
)


def has_malloc_settings() -> bool:
    """Return whether it says how the C library is to allocate memory."""
    return any(name in os.environ for name in MALLOC_VARIABLES)


TORCHRUN_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
)


def torchrun_environment() -> dict[str, str]:
    """Return the variables that are set and by which torchrun tells a process its place."""
    return {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}


def ranks_here() -> int | None:
    """Return how many ranks torchrun has started on this machine; None: it has not."""
    count = torchrun_environment().get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() else None


def is_first_rank_here() -> bool:
    """Return whether this process is the first rank of its machine; True where it is no rank."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def torchrun_error_file() -> Path | None:
    """Return the file in which torchrun looks for why this rank ended; None: it is no rank."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file and "TORCHELASTIC_RUN_ID" in os.environ else None


def gloo_interface() -> str | None:
    """Return the interface that gloo was told to listen on, if it was."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def ray_address() -> str | None:
    """Return the address of the cluster whose job this process is, if it is one."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in ("", "local") else address


def ray_tmpdir() -> str | None:
    """Return the folder that Ray was told to make its own in, if it was."""
    return os.environ.get("RAY_TMPDIR") or None


@contextmanager
def marked(mark: str) -> Iterator[None]:
    """Within the block processes that are started, by whatever library, have a word with them.

    Those who write their title over their command line (setproctitle, as Ray's agents do) write it
    over their environment too, and the word is gone, unless SPT_NOENV is set.
    """
    changes = {"QUORATE_MARK": mark, "SPT_NOENV": "1"}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def child_environment(
    defaults: Mapping[str, str], changes: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for a process that is started: this one's, changed.

    Args:
        defaults: for what this one lacks.
        changes: instead of what this one has.
    """
    return {**defaults, **os.environ, **(changes or {})}


def become(environment: Mapping[str, str]) -> None:
    """Have this process's environment be another one, as that of a new interpreter would be."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def hash_seed() -> str | None:
    """Return PYTHONHASHSEED; None where each process hashes strings by a number of its own."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    return None if seed in ("", "random") else seed


def cache_dir() -> Path:
    """Return the folder for downloaded data sets.

    The folder is QUORATE_DATA if set, otherwise "quorate" in the user's cache directory.
    """
    if chosen := os.environ.get("QUORATE_DATA"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "quorate"


def wants_full_tracebacks() -> bool:
    """Return whether tracebacks are to be shown as they are: QUORATE_TRACEBACK=full."""
    return os.environ.get("QUORATE_TRACEBACK", "").lower() == "full"
