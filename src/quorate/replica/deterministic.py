"""Kernels with the same bits each time: choices left open by torch on a GPU.

cuDNN has several algorithms for a convolution. Some add with atomics, in the order of thread
timing; and with ``benchmark`` the fastest is chosen by a measurement, in each process anew.
``deterministic`` excludes both.

Some operators of torch add in the order of thread timing, too: on GPUs with atomics (``index_add``,
``scatter_add``, the backward pass of bilinear interpolation and of most fused attention), on CPUs
with several intra-op threads (``index_put`` with ``accumulate``).
``torch.use_deterministic_algorithms`` replaces them, or refuses operators without another version.

cuBLAS reads the sizes of its workspaces from the environment when CUDA starts. With two sizes, as
by default, a product may use either, with a kernel that depends on the size. So ``fix_workspace``
sets a single size before CUDA starts. cuDNN's recurrent layers have a cuBLAS of their own with the
same behaviour, according to torch's notes on ``torch.nn.LSTM``. Not measured on a GPU yet.

This file names CUDA: cuBLAS and cuDNN are NVIDIA's, and torch has no such switch for all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from quorate.errors import UserError
from quorate.machine.environment import device_environment, set_device_variable
from quorate.machine.shared_setting import SharedSetting, renewal
from quorate.replica.computing import Computing
from quorate.replica.precision import FLOAT32, float32_products
from quorate.replica.shared.code import user_line_of
from quorate.replica.torch_internals import let_compiler_measure, may_compiler_measure

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
ONE_SIZE = (":4096:8", ":16:8")  # the values with which torch's flag allows products
WARN, ERROR = 1, 2  # of torch's deterministic debug mode
REFUSED = " does not have a deterministic implementation, but you set"

# Whether CUDA started in this process before ``fix_workspace``: a fact of the process.
_is_too_late = False


def are_any_nvidia(devices: Sequence[torch.device]) -> bool:
    """Return whether a device is a GPU with the libraries cuBLAS and cuDNN."""
    return any(device.type == "cuda" for device in devices)


def fix_workspace(devices: Sequence[torch.device]) -> str | None:
    """Give cuBLAS workspaces of one size, in this process and in processes started later.

    To be called before quorate uses a GPU. A value set by the user is kept.

    Returns:
        Why the bits are in doubt: CUDA has started, or the user's value has two sizes.
    """
    global _is_too_late
    if not are_any_nvidia(devices):
        return None
    value = device_environment().get(WORKSPACE)
    if value is None:
        set_device_variable(WORKSPACE, ONE_SIZE[0])
        _is_too_late = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if _is_too_late:
        return (
            "torch only warns of operators without a fixed order: the script uses a GPU before it "
            f"makes the Trainer, which sets {WORKSPACE}; make the Trainer first, or set "
            f"{WORKSPACE}={ONE_SIZE[0]} before the program starts"
        )
    if value is not None and value not in ONE_SIZE:
        return (
            f"torch only warns of operators without a fixed order: {WORKSPACE} is {value!r}, "
            f"expected {' or '.join(ONE_SIZE)}; set it so, or leave the variable out"
        )
    return None


def _products_pass() -> bool:
    """Return whether torch's flag allows products on GPUs in this process."""
    return not _is_too_late and device_environment().get(WORKSPACE) in ONE_SIZE


@contextmanager
def one_order(devices: Sequence[torch.device]) -> Iterator[list[str]]:
    """Let operators of this process add in a fixed order, or raise, inside the block.

    Yields lines for the user.
    """
    # With the flag, torch refuses every product on a GPU whose workspaces may have two sizes.
    warns = are_any_nvidia(devices) and not _products_pass()
    said = "deterministic=True: every operator adds in a fixed order, which takes longer"
    if warns:
        said += "; torch only warns of operators without a fixed order"
    set_by_script = _read_order()
    # The fill guards against programs that read uninitialized memory, and takes time.
    ours = WARN if warns else ERROR, False, False
    with _order.at(set_by_script if set_by_script[0] == ERROR else ours):
        yield [f"{said}; --no-deterministic turns it off"]


_Order = tuple[int, bool, bool]  # mode, whether memory is filled, whether the compiler measures


def _read_order() -> _Order:
    memory: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    return mode, fills, may_compiler_measure()


def _write_order(values: _Order) -> None:
    memory: Any = torch.utils.deterministic
    mode, memory.fill_uninitialized_memory, measures = values
    torch.set_deterministic_debug_mode(mode)
    let_compiler_measure(measures)


_order = SharedSetting(_read_order, _write_order)


@contextmanager
def refusals(*, named: bool) -> Iterator[None]:
    """Shorten torch's error for an operator without a fixed order to a line with a cure.

    Args:
        named: whether ``one_order`` is on; else the script itself has set torch's flag.
    """
    try:
        yield
    except RuntimeError as error:
        operator, found, _ = str(error).partition(REFUSED)
        if not (named and found):
            raise
        where = f" ({line})" if (line := user_line_of(error)) else ""
        raise UserError(
            f"{operator}{where}",
            "this operator adds in a different order each time, and torch has no deterministic "
            "version",
            fix="use another operator, or pass deterministic=False (--no-deterministic), which "
            "allows "
            "different bits in each run",
        ) from error


@contextmanager
def deterministic(devices: Sequence[torch.device]) -> Iterator[list[str]]:
    """Make this process's convolutions on GPUs repeatable inside the block.

    Args:
        devices: the devices of this process; without a GPU, nothing is done.

    Yields lines for the user: a setting of the script is switched off.
    """
    if not are_any_nvidia(devices):
        yield []
        return
    with _cudnn.at((True, False)) as (_, had_benchmark):
        said = "cudnn.benchmark is off now: a choice of kernels by measured time changes the bits"
        yield [said] if had_benchmark else []


def _read_cudnn() -> tuple[bool, bool]:
    cudnn: Any = torch.backends.cudnn
    return cudnn.deterministic, cudnn.benchmark


def _write_cudnn(values: tuple[bool, bool]) -> None:
    cudnn: Any = torch.backends.cudnn
    cudnn.deterministic, cudnn.benchmark = values


_cudnn = SharedSetting(_read_cudnn, _write_cudnn)


@contextmanager
def repeatable(computing: Computing, devices: Sequence[torch.device]) -> Iterator[list[str]]:
    """Compute as the settings say, with the same bits each time, inside the block.

    Yields lines for the user: settings of the script that are switched off, and slower operators.
    """
    with ExitStack() as stack:
        said = [
            *stack.enter_context(float32_products(computing.precision)),
            *stack.enter_context(deterministic(devices)),
        ]
        if computing.deterministic:
            said += stack.enter_context(one_order(devices))
        yield said


def renewal_of_settings() -> Callable[[], None]:
    """Return a function that sets what ``repeatable`` has set now, after turns of other loops."""
    return renewal((FLOAT32, _cudnn, _order))


def remarks(model: torch.nn.Module, devices: Sequence[torch.device]) -> list[str]:
    """Return lines for a model whose bits depend on a missing environment variable."""
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    if not are_any_nvidia(devices) or not recurrent or WORKSPACE in device_environment():
        return []
    return [
        "the model has recurrent layers, and some versions of cuDNN compute different bits each "
        f"time; set {WORKSPACE}={ONE_SIZE[0]} in the environment before the program starts"
    ]
