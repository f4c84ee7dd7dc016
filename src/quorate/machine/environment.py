"""The environment: read in this module only, and never written except for two variables.

The exception is a process forked on behalf of another process, which takes over the whole
environment of that process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

READ_BY_ITEM, READ_BY_CALL = "environ", "getenv"  # of ``os``: readers use either name

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
    """Return the environment variables that choose a processor's kernels, if set."""
    return {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ}


def device_environment() -> dict[str, str]:
    """Return the environment variables that devices, threads and interfaces depend on, if set."""
    return {name: os.environ[name] for name in DEVICE_VARIABLES if name in os.environ}


def set_device_variable(name: str, value: str) -> None:
    """Set a variable for libraries of this process loaded later, and for child processes."""
    os.environ[name] = value


MALLOC_VARIABLES = (
    *("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"),
)


def has_malloc_settings() -> bool:
    """Return whether the environment configures the allocation of memory by the C library."""
    return any(name in os.environ for name in MALLOC_VARIABLES)


TORCHRUN_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
)


def torchrun_environment() -> dict[str, str]:
    """Return the variables with which torchrun tells a process its place, if set."""
    return {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}


def ranks_here() -> int | None:
    """Return the number of ranks that torchrun started on this machine; None without torchrun."""
    count = torchrun_environment().get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() else None


def is_first_rank_here() -> bool:
    """Return whether this process is the first rank of its machine; True without torchrun."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def torchrun_error_file() -> Path | None:
    """Return the file from which torchrun reads the error of this rank; None without torchrun."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file and "TORCHELASTIC_RUN_ID" in os.environ else None


def gloo_interface() -> str | None:
    """Return the interface that gloo is configured to listen on, if any."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def ray_address() -> str | None:
    """Return the address of the Ray cluster whose job runs this process, if any."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in ("", "local") else address


def ray_tmpdir() -> str | None:
    """Return the folder configured for Ray's temporary files, if any."""
    return os.environ.get("RAY_TMPDIR") or None


@contextmanager
def marked(mark: str) -> Iterator[None]:
    """Put a mark into the environment of all processes started within the block, by any library.

    Programs that write their title over their command line (by setproctitle, as Ray's agents do)
    also overwrite their environment, and the mark with it, unless SPT_NOENV is set.
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
    """Return the environment for a child process: this process's environment, changed.

    Args:
        defaults: variables used if this process lacks them.
        changes: variables that replace this process's.
    """
    return {**defaults, **os.environ, **(changes or {})}


def become(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process completely, as in a new interpreter."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def hash_seed() -> str | None:
    """Return PYTHONHASHSEED; None if each process hashes strings with a random seed."""
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
    """Return whether the user wants unfolded tracebacks: QUORATE_TRACEBACK=full."""
    return os.environ.get("QUORATE_TRACEBACK", "").lower() == "full"
