"""A simulated accelerator: devices ``sim:0`` to ``sim:3`` in this process, without hardware.

Tensors of these devices are torch's own; the host cannot touch their memory; streams are threads
that run late; kernels are the CPU's, and so are most bits. A use of memory without an order between
two streams, or freeing memory in use by another stream, is an error with both stacks.

A process with the folder of ``AUTOLOAD`` in the import path has the devices as soon as torch is
imported, as with the plug-in of a real accelerator: ``environment()`` is for such processes.
"""

import atexit
import ctypes
import os
from pathlib import Path
from types import TracebackType

import torch
from support.accelerator import build, group

AUTOLOAD = Path(__file__).parent / "autoload"
TESTS = Path(__file__).parents[2]
DELAYS = "SIM_DELAYS"  # share of jobs, most microseconds, seed


class Module:
    """``torch.sim``: the module of the accelerator for torch."""

    _initialized = True  # for torch.utils.checkpoint
    Stream, Event = torch.Stream, torch.Event

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.device = _DeviceGuard

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        """Do nothing: the module is ready as soon as loaded."""

    def _is_in_bad_fork(self) -> bool:
        return bool(self._library.sim_is_forked())

    def device_count(self) -> int:
        return int(self._library.sim_device_count())

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: int | str | torch.device) -> None:
        torch.accelerator.set_device_index(_index(device))

    def synchronize(self, device: int | str | torch.device | None = None) -> None:
        torch.accelerator.synchronize(device)

    def set_per_process_memory_fraction(
        self, fraction: float, device: int | str | torch.device = "sim"
    ) -> None:
        self._library.sim_set_fraction(_index(device), fraction)

    def get_per_process_memory_fraction(self, device: int | str | torch.device = "sim") -> float:
        return float(self._library.sim_fraction(_index(device)))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _generator(self, device: int | str | torch.device) -> torch.Generator:
        found: torch.Generator = torch.ops.simulated_accelerator.generator(_index(device))
        return found

    def manual_seed(self, seed: int) -> None:
        self._generator("sim").manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for device in range(self.device_count()):
            self._generator(device).manual_seed(seed)

    def get_rng_state(self, device: int | str | torch.device = "sim") -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: int | str | torch.device = "sim") -> None:
        self._generator(device).set_state(state)

    # Switches for tests.

    def delay(self, share: float, microseconds: int, seed: int = 0) -> None:
        """Have a share of the jobs of new streams sleep first, for so long at most."""
        self._library.sim_set_delays(share, microseconds, seed)

    def limit_memory(self, device: int, size: int | None) -> None:
        """Give a device so many bytes; None: as many as there are."""
        self._library.sim_set_limit(device, -1 if size is None else size)

    def faults(self) -> int:
        """Return how many accesses and frees were in no order."""
        return int(self._library.sim_faults())

    def calls(self) -> tuple[int, int]:
        """Return how many operators ran late, and how many the host waited for."""
        return int(self._library.sim_calls_late()), int(self._library.sim_calls_in_step())


class _DeviceGuard:
    """Makes a device the current device: ``with torch.sim.device(1):``."""

    def __init__(self, device: int | str | torch.device) -> None:
        self._device = device if isinstance(device, int) else torch.device(device).index
        self._before = 0

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        if self._device is not None and self._device >= 0:
            torch.accelerator.set_device_index(self._device)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.accelerator.set_device_index(self._before)


def _index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def register() -> None:
    """Give this process the devices; torch calls this where ``AUTOLOAD`` is in the import path.

    Raises:
        RuntimeError: there is no compiler, or the compiler fails.
    """
    if hasattr(torch, "sim"):
        return
    reason = build.lacking()
    if reason is not None:
        raise RuntimeError(reason)
    path = build.library()
    library = ctypes.CDLL(str(path))
    library.sim_set_delays.argtypes = [ctypes.c_double, ctypes.c_int, ctypes.c_uint]
    library.sim_set_fraction.argtypes = [ctypes.c_int, ctypes.c_double]
    library.sim_fraction.restype = ctypes.c_double
    library.sim_set_limit.argtypes = [ctypes.c_int, ctypes.c_long]
    library.sim_register()
    module = Module(library)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    # As on CUDA a moved module keeps its parameters, and their sharing.
    torch.__future__.set_swap_module_params_on_conversion(True)
    group.register()
    if DELAYS in os.environ:
        share, microseconds, seed = os.environ[DELAYS].split(",")
        module.delay(float(share), int(microseconds), int(seed))
    # Threads of streams end with the process, and must not be in the middle of a job.
    atexit.register(_settle)


def _settle() -> None:
    if not torch.sim._is_in_bad_fork():
        for device in range(torch.sim.device_count()):
            torch.accelerator.synchronize(device)


def environment(delays: tuple[float, int, int] | None = None) -> dict[str, str]:
    """Return this process's environment, with variables that give the devices to a child process.

    Args:
        delays: share of the jobs that sleep first, microseconds at most, seed.
    """
    paths = [str(AUTOLOAD), str(TESTS), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return env if delays is None else {**env, DELAYS: ",".join(map(str, delays))}
