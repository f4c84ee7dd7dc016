"""A kind of device for machines without an accelerator: torch treats the device as an accelerator.

``register({"cumsum"})`` makes the device ``toy:0`` out of this process's memory.
Tensors of the device are torch's own, with storage, strides and autograd. An operator is run by the
CPU's kernel on the same memory, so numbers are the CPU's. Lacking operators have no kernel at all,
so torch itself reports the lack. The device has no random numbers either.

A process can have one such kind, for good: only scripts in separate processes use the module.
"""

import ctypes
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils import dlpack
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from quorate.replica.streams import RANDOM_OPERATORS

NAME = "toy"
OWN = {
    *("resize_", "native_dropout"),  # the first is below; random numbers are missing
    *(name.partition(".")[0] for name in RANDOM_OPERATORS),
}
# The CPU's kernels of these compute nothing, and take tensors of any device.
SHAPES = {"as_strided", "view", "_reshape_alias", "unfold", "set_", "view_as_real"}
CPU, EXTENSION = 1, 12  # kinds of devices, by DLPack

_library: list[torch.library.Library] = []  # holds the kernels: to be kept
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Module:
    """The interface of ``torch.toy`` for torch: there is a device, and no generator."""

    is_initialized = is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed = manual_seed_all = staticmethod(lambda seed: None)


def register(lacking: Collection[str] = ()) -> None:
    """Make the device.

    Args:
        lacking: operators without a kernel: "cumsum" with all variants.
    """
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        packet, _, overload = full.removeprefix("aten::").partition(".")
        known = full.startswith("aten::") and hasattr(torch.ops.aten, packet)
        if not known or packet in lacking or packet in OWN or not has_kernel(full, "CPU"):
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernel = _shaping(operator) if packet in SHAPES else _computing(operator)
        library.impl(full.removeprefix("aten::"), kernel, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("resize_", _resize_, "PrivateUse1")
    # The device has no streams, and torch no way to say so from Python.
    torch.accelerator.synchronize = lambda device=None: None
    clone = torch.UntypedStorage.clone
    # Copying a bare storage needs an allocator, impossible to give from Python.
    torch.UntypedStorage.clone = lambda self: (  # type: ignore[method-assign]
        _cloned(self) if self.device.type == NAME else clone(self)
    )


def _cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return values.clone().untyped_storage()


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    return _seen(tensor, CPU, 0)


def _seen(tensor: torch.Tensor, kind: int, index: int) -> torch.Tensor:
    """The same memory as a tensor of another device."""
    capsule = dlpack.to_dlpack(tensor.detach())
    start = _pointer(capsule, b"dltensor")
    # DLTensor begins with a pointer, then kind and number of the device.
    fields = (ctypes.c_int32 * 2).from_address(start + ctypes.sizeof(ctypes.c_void_p))
    fields[:] = [kind, index]
    return dlpack.from_dlpack(capsule)


def _shaping(operator: Any) -> Callable[..., Any]:
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: operator.redispatch(cpu, *args, **kwargs)


def _computing(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        devices = [v.device if isinstance(v, torch.Tensor) else v for v in flat]
        index = next(
            (d.index or 0 for d in devices if isinstance(d, torch.device) and d.type == NAME), 0
        )
        given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for n, value in enumerate(flat):
            if isinstance(value, torch.device):
                flat[n] = torch.device("cpu")
            elif isinstance(value, torch.Tensor) and value.device.type == NAME:
                # An empty tensor may be an `out` that grows; memory of other owners does not grow.
                flat[n] = (
                    on_cpu(value) if value.numel() else torch.empty(value.shape, dtype=value.dtype)
                )
                given[id(flat[n])] = flat[n], value
        args, kwargs = tree_unflatten(flat, spec)

        def back(result: torch.Tensor) -> torch.Tensor:
            if id(result) not in given:
                return _seen(result, EXTENSION, index)
            seen, value = given[id(result)]
            if seen.data_ptr() != value.data_ptr():
                value.set_(_seen(seen, EXTENSION, index))
            return value

        return tree_map_only(torch.Tensor, back, operator(*args, **kwargs))

    return run


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    def seen(tensor: torch.Tensor) -> torch.Tensor:
        return on_cpu(tensor) if tensor.device.type == NAME else tensor

    seen(target).copy_(seen(source))
    return target


def _resize_(tensor: torch.Tensor, size: list[int], *, memory_format: Any = None) -> torch.Tensor:
    grown = torch.empty(size, dtype=tensor.dtype)
    return tensor.set_(_seen(grown, EXTENSION, tensor.device.index))
